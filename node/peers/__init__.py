"""The other nodes: which cluster this one is a member of.

in: what the node was started with; out: the view that clients are told.
"""
