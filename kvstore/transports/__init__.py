"""Move requests and pages over bulk TCP, shared memory or gRPC.

in: messages and callers' buffers from `kvstore.transports.channel`
out: bytes on a socket or in a node's mapped memory
"""
