"""R3: tenant B never reads tenant A's pages; the salt is in the key."""

from typing import Any

import pytest
from known_pages import Pages

from kvstore import Client

OTHERS: list[dict[str, str]] = [
    {"tenant": "b"},
    {"tenant": "a", "salt": "user-2"},
    {"tenant": "a", "salt": ""},
    {"tenant": "user-1", "salt": "a"},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_r03_no_call_of_another_tenant_reaches_a_page(
    client: Client, other: dict[str, Any]
) -> None:
    owner = Pages("shared-model", tenant="a", salt="user-1")
    stranger = Pages("shared-model", **other)
    keys = owner.keys(*range(4))
    owner.put(client, keys)
    assert client.lookup(stranger.namespace, keys).present == (False,) * 4
    assert stranger.get(client, keys) == [False] * 4
    parts = stranger.namespace.layout.layer_ranges(0)
    assert not any(client.get_ranges(stranger.namespace, keys, parts, [bytearray(4096)] * 4))
    assert [page.present for page in client.stat(stranger.namespace, keys)] == [False] * 4
    assert list(client.list_pages(stranger.namespace)) == []
    assert client.pin(stranger.namespace, keys, 1.0) == [False] * 4
    assert client.remove(stranger.namespace, keys) == [False] * 4
    assert client.verify(stranger.namespace, keys) == (0, 0, 4)
    assert owner.get(client, keys) == [True] * 4, "another tenant changed the owner's pages"
    client.remove(owner.namespace, keys)
