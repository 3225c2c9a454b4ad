"""LMCache's own contract suite, run on an adapter of ours.

test_contract.py copies this file into the suite's package. Only the two fixtures are ours.
"""

import json
import os
import time
import uuid
from types import SimpleNamespace

import pytest
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

from . import test_mock_l2_adapter as suite
from .test_mock_l2_adapter import *  # noqa: F403

# LMCache's wrapper of a native_plugin signals before it notifies its listeners; the suite checks
# the listeners at once.
LISTENERS_S = 0.05 if os.environ["KVSTORE_TEST_FORM"] == "native_plugin" else 0.0
wait_for_signal = suite.wait_for_event_fd


def wait_for_event_fd(*arguments, **options):
    found = wait_for_signal(*arguments, **options)
    time.sleep(LISTENERS_S)
    return found


suite.wait_for_event_fd = wait_for_event_fd


def _adapter():
    spec = json.loads(os.environ["KVSTORE_TEST_SPEC"])
    spec["adapter_params"]["salt"] = uuid.uuid4().hex
    config = parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(spec)]))
    return create_l2_adapter(config.adapters[0])


@pytest.fixture
def adapter():
    made = _adapter()
    yield made
    made.close()


slow_adapter = adapter
