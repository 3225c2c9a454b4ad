"""Use many nodes as one store: membership, placement of keys, and calls to several members.

in: a view, told by any node, and the keys of a call; out: owners of each key, and answers in the
order of the keys.
"""
