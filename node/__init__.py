"""Serve pages: the storage node.

Never imported by an engine's environment.
"""

import os

# gRPC logs a line for each failed handshake and for each call with compressed messages, past
# Python's logging and its LogRate. The node gets an exception or a status for these as well. gRPC
# reads this variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
