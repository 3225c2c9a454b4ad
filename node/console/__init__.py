"""Show in a browser what this node and its cluster are doing.

In: connections that the metrics' port hands over because they ask for `/console/`. Out: the page's
files, a stream of what is happening, pages looked up. Everything is asked of the service as any
client asks it, by who is at the browser. It costs nothing while nobody looks, but for a sample of
counters each ten seconds.
"""
