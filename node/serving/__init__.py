"""Serve clients: transports, connections, sessions, and the implementation of each request.

Input are frames and gRPC calls; output are replies, and reservations and holds on pages of
`node.memory` and `node.disk`.
"""
