"""Show in a browser what this node and its cluster are doing.

Input are connections that the metrics port passes on because they request `/console/`. Output are
the page's files, a stream of events, and pages that were looked up. All data comes from the service
by the user's own credential. Without users it costs a sample of counters every ten seconds.
"""
