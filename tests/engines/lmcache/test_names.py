"""R1, R2 and R3 on LMCache's keys and objects: any difference misses, an identical key hits.

Also the listing, the status and the options.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from gpu_agent.objects.store import FIRST_S
from kvstore import ConfigError
from kvstore.tools.node_process import NodeProcess

SALT = {"salt": "same"}


def loaded(driver: Any, keys: Any, objects_of: Any, **kind: Any) -> list[bool]:
    targets = objects_of(len(keys), fill=False, **kind)
    hits: list[bool] = driver.load(keys, targets)
    for hit, target in zip(hits, targets, strict=True):
        assert hit or not target.raw_data.view(torch.uint8).any(), (
            "the buffer of a miss was written"
        )
    return hits


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "r2"},
        {"salt": "else"},
        {"tenant": "else"},
        {"epoch": 1},
    ],
    ids=str,
)
def test_other_weights_and_tenants_never_hit(
    form: str,
    other: Any,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    shared_node: NodeProcess,
    keys_of: Any,
    objects_of: Any,
) -> None:
    ours = {"salt": f"{form}{other}"}
    one, same = (open_adapter(spec(form, shared_node.address, **ours)) for _ in range(2))
    stranger = open_adapter(spec(form, shared_node.address, **ours | other))
    keys = keys_of(3)
    assert one.store(keys, objects_of(3)).is_successful()
    time.sleep(FIRST_S)  # lookups ask the node for new objects only this often
    assert same.lookup(keys) == loaded(same, keys, objects_of) == [True] * 3
    assert stranger.lookup(keys) == loaded(stranger, keys, objects_of) == [False] * 3


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "tenant B"},
        {"cache_salt": ""},
        {"model_name": "n"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
    ],
    ids=str,
)
def test_keys_that_differ_never_hit(driver: Any, other: Any, keys_of: Any, objects_of: Any) -> None:
    keys = keys_of(2, cache_salt="tenant A")
    assert driver.store(keys, objects_of(2)).is_successful()
    strangers = keys_of(2, **{"cache_salt": "tenant A"} | other)
    assert driver.lookup(strangers) == loaded(driver, strangers, objects_of) == [False] * 2
    assert driver.lookup(keys) == loaded(driver, keys, objects_of) == [True] * 2


def test_dtypes_of_equal_width_never_hit(
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    shared_node: NodeProcess,
    keys_of: Any,
    objects_of: Any,
) -> None:
    """The dtype is part of the key.

    With `plugin` each call passes the dtype. Both forms take it from the option kv_format, which
    also tells the two kinds of fp8 apart; vLLM shows either as bytes.
    """
    keys = keys_of(2)
    driver = open_adapter(spec("plugin", shared_node.address))
    assert driver.store(keys, objects_of(2, dtype=torch.float16)).is_successful()
    shape = torch.Size((2, 3, 64))
    for dtype, hits in ((torch.float16, [True] * 2), (torch.bfloat16, [False] * 2)):
        assert driver.lookup(keys, {0: MemoryLayoutDesc(shapes=[shape], dtypes=[dtype])}) == hits
        assert loaded(driver, keys, objects_of, dtype=dtype) == hits
    for form in ("native_plugin", "plugin"):
        one, other = (
            open_adapter(spec(form, shared_node.address, kv_format=name, **SALT))
            for name in ("fp8_e4m3", "fp8_e5m2")
        )
        assert one.store(keys, objects_of(2)).is_successful()
        assert other.lookup(keys) == loaded(other, keys, objects_of) == [False] * 2


def test_object_of_another_length_is_a_miss(driver: Any, keys_of: Any, objects_of: Any) -> None:
    keys = keys_of(2)
    assert driver.store(keys, objects_of(2)).is_successful()
    for shape in ((2, 3, 63), (2, 3, 65)):
        assert loaded(driver, keys, objects_of, shape=shape) == [False] * 2


def test_bytes_round_trip_with_holes(driver: Any, keys_of: Any, objects_of: Any) -> None:
    """Each byte keeps its position; the bench can not show that, as its objects are constant."""
    keys, sources = keys_of(9), objects_of(9)
    assert driver.store(keys[::2], sources[::2]).is_successful()
    targets = objects_of(9, fill=False)
    assert driver.load(keys, targets) == [i % 2 == 0 for i in range(9)]
    for i in range(0, 9, 2):
        assert bytes(targets[i].byte_array) == bytes(sources[i].byte_array)
    driver.adapter.submit_unlock(keys)


def test_list_l2_keys_returns_own_keys_in_pages(
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    shared_node: NodeProcess,
    keys_of: Any,
    objects_of: Any,
) -> None:
    driver, stranger = (open_adapter(spec("plugin", shared_node.address)) for _ in range(2))
    keys = keys_of(7, cache_salt="a b") + keys_of(
        3, model_name="n", kv_rank=0x02010201, object_group_id=10
    )
    assert driver.store(keys, objects_of(10)).is_successful()
    assert stranger.store(keys[:2], objects_of(2)).is_successful()
    listed: list[Any] = []
    token = None
    while True:
        page = driver.adapter.list_l2_keys(page_size=4, cursor=token)
        listed += page.entries
        token = page.next_page_token
        if token is None:
            break
        assert len(page.entries) == 4
    assert {entry.key.to_object_key() for entry in listed} == set(keys)
    assert {entry.size_bytes for entry in listed} == {2 * 3 * 64 * 2}
    of_model = driver.adapter.list_l2_keys(model_name="n").entries
    assert {entry.key.to_object_key() for entry in of_model} == set(keys[7:])
    for wrong in ({"page_size": 0}, {"cursor": "what"}, {"cursor": "1.2.3"}):
        with pytest.raises(ValueError):  # noqa: PT011 -- LMCache's own choice
            driver.adapter.list_l2_keys(**wrong)
    driver.adapter.delete(keys[:3])
    assert len(driver.adapter.list_l2_keys().entries) == 7


def test_status_reports_the_nodes_status(
    driver: Any, form: str, keys_of: Any, objects_of: Any
) -> None:
    driver.store(keys_of(2), objects_of(2))
    status = driver.adapter.report_status()
    assert status["is_healthy"]
    if form == "plugin":
        json.dumps(status)
        assert status["node"]["state"] == "SERVING"
        assert status["objects"]["stored"] == 2


@pytest.mark.parametrize(
    ("form", "params", "message"),
    [
        ("plugin", {"revision": ""}, "give the option revision"),
        ("native_plugin", {"revision": ""}, "give the option revision"),
        ("plugin", {"kv_format": ""}, "give the option kv_format"),
        ("native_plugin", {"kv_format": ""}, "give the option kv_format"),
        ("plugin", {"kv_format": 16}, "kv_format=16 must be a str"),
        ("plugin", {"model": "m"}, "model"),
        ("plugin", {"adress": "x"}, "unknown option 'adress'"),
        ("plugin", {"load_timeout_s": 100.0}, r"load_timeout_s=100.0 is too long"),
        ("native_plugin", {"lookup_timeout_s": 3.0}, r"lookup_timeout_s=3.0 is too long"),
        ("plugin", {"max_capacity_gb": "much"}, "max_capacity_gb='much'"),
    ],
)
def test_wrong_option_fails_the_start(
    form: str,
    params: Any,
    message: str,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    unused_address: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_adapter(spec(form, unused_address, **params))


def test_unreachable_node_is_a_miss(
    form: str,
    spec: Callable[..., dict[str, Any]],
    open_adapter: Any,
    unused_address: str,
    keys_of: Any,
    objects_of: Any,
) -> None:
    driver = open_adapter(spec(form, unused_address))
    keys: list[ObjectKey] = keys_of(3)
    assert not driver.store(keys, objects_of(3)).is_successful()
    assert driver.lookup(keys) == loaded(driver, keys, objects_of) == [False] * 3
    driver.adapter.delete(keys)
    if form == "plugin":
        assert not driver.adapter.report_status()["is_healthy"]
        assert driver.adapter.list_l2_keys().entries == ()
