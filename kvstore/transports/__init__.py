"""How requests and pages travel: the bulk TCP, shared-memory and gRPC wires, and the frames that
node and client share.

in: messages and callers' buffers from `kvstore.transports.channel`
out: bytes on a socket or in a node's mapped memory
"""
