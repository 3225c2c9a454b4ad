"""Tell routers what the store has: the node's feed as ZMQ events, and queries over HTTP.

    Client.feed -> stored_blocks (of all KVs of a model) -> wires (events) -> publisher (ZMQ)
    HTTP -> queries (Client.query)

A process of its own (`kvstore events`): node and engines know nothing of it. docs/decisions/0061.
"""
