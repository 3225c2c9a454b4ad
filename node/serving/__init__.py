"""Serve clients: transports, connections, sessions, and the meaning of each request.

in: frames and gRPC calls; out: replies, and reservations and holds on pages of `node.memory` and
`node.disk`.
"""
