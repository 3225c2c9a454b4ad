"""An engine that must not continue from its own cached KV must not load from the store either."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_vllm
import pytest

from kvstore.errors import ConfigError


@pytest.mark.parametrize("route", [on_vllm.connector, on_vllm.tier])
def test_vllm_without_prefix_caching_is_refused(
    route: Callable[[Path, Any], Any], tmp_path: Path
) -> None:
    """vLLM disables prefix caching for MLA on a CPU without AMX, where a hit changes the tokens."""
    route(tmp_path, {})
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        route(tmp_path, {"cache_config.enable_prefix_caching": False})
