"""The other nodes: which cluster this one is a member of.

in: what the node was started with, and what etcd tells; out: the view that clients and listeners
are told.
"""
