"""Move requests and pages over bulk TCP, shared memory or gRPC.

Input are messages and callers' buffers from `kvstore.transports.channel`; output are bytes on a
socket or in a node's mapped memory.
"""
