"""A plugin of pytest (`make test-oldest`): nodes run on another interpreter,
KVSTORE_NODE_PYTHON.
"""

import os

from kvstore.tools.node_process import NodeProcess

DEFAULTS = NodeProcess.__init__.__kwdefaults__
assert DEFAULTS is not None
DEFAULTS["python"] = os.environ["KVSTORE_NODE_PYTHON"]
