"""Serve pages: the storage node.

Never imported by an engine's environment.
"""

import os

# gRPC writes a line for each handshake that a stranger spoils, and for each call whose messages are
# compressed, past Python's logging and its LogRate. What a node has to know is an exception or a
# status as well. gRPC looks here when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
