"""A pytest plugin (`make test-oldest`) that runs nodes with the Python of KVSTORE_NODE_PYTHON."""

import os

from kvstore.tools.node_process import NodeProcess

DEFAULTS = NodeProcess.__init__.__kwdefaults__
assert DEFAULTS is not None
DEFAULTS["python"] = os.environ["KVSTORE_NODE_PYTHON"]
