"""Tell routers which blocks this node has: a snapshot, and then what comes and goes.

The tiers note changes (`node.memory.changes`); the threads of readers do the rest.
"""
