"""Serve the public gRPC API in processes of their own, which the node starts and watches.

`main` is such a process, `gateway` its life, `server` the gRPC methods, `upstream` its connections
to the node. `supervisor` is the node's side; `node.serving.gateway` serves the connections.
"""
