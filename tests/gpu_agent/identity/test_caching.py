"""An engine that must not go on from KV of its own does not go on from the store's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_vllm
import pytest

from kvstore.errors import ConfigError


@pytest.mark.parametrize("route", [on_vllm.connector, on_vllm.tier])
def test_vllm_without_prefix_caching_stays_out(
    route: Callable[[Path, Any], Any], tmp_path: Path
) -> None:
    """It turns it off by itself, for one with MLA on a CPU without AMX, where a hit makes other
    tokens.
    """
    route(tmp_path, {})
    with pytest.raises(ConfigError, match="--enable-prefix-caching"):
        route(tmp_path, {"cache_config.enable_prefix_caching": False})
