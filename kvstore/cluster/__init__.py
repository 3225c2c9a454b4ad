"""Use many nodes as one store: membership, placement of keys, and calls to several members.

in:   a view, sent by any node, and the keys of a call
out:  the owners of each key, and answers in the order of the keys
"""
