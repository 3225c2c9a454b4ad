"""Where clients meet the node: the wires' servers, their connections and sessions, what each
request means.

in: frames and gRPC calls; out: replies, and reservations and holds on pages of `node.memory` and
`node.disk`.
"""
