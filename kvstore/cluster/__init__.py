"""Many nodes as one store: who is a member, which members own a key, and a call spread over them.

in: a view, told by any node, and the keys of a call; out: owners of each key, and answers in the
order of the keys.
"""
