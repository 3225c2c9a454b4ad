"""The storage node: a server that keeps pages. Never imported by an engine's environment."""

import os

# gRPC writes a line for each handshake that a stranger spoils, past Python's logging and its LogRate. It looks here
# when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
