"""Work with the other nodes of a cluster.

in: what the node was started with, and what etcd tells; out: the view that clients and listeners
are told.
"""
