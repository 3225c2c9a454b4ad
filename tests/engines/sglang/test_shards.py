"""Ranks of any number read each other's pages of heads: `head_shards` with `page_head`."""

import uuid
from typing import Any

import pytest
import torch
from harness import fill, mha, mla, page_bytes, parallel

from kvstore import ConfigError

TOKENS = list(range(64))
SLOTS = torch.arange(len(TOKENS))
HEADS = 8


def rank(engine: Any, number: int, ranks: int, **options: Any) -> Any:
    with parallel(number, ranks):
        return engine(mha("page_head", heads=HEADS // ranks), head_shards=HEADS, **options)


def heads(made: Any, first: int = 0, end: int = HEADS) -> torch.Tensor:
    """Return these heads of the tested slots as bytes."""
    pages = len(TOKENS) // made.page
    return made.host.kv_buffer.view(torch.uint8)[:, :pages, first:end]


@pytest.mark.parametrize("v1", [1, 0], ids=["pools", "flat pages"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 8), (8, 4), (4, 2)])
def test_ranks_read_what_other_numbers_of_ranks_stored(
    engine: Any, v1: int, writers: int, readers: int
) -> None:
    model = {"revision": uuid.uuid4().hex, "interface_v1": v1}
    whole = rank(engine, 0, 1, **model)
    fill(whole.host)
    for number in range(writers):
        writer, own = rank(engine, number, writers, **model), HEADS // writers
        heads(writer, 0, own).copy_(heads(whole, number * own, (number + 1) * own))
        assert writer.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    for number in range(readers):
        reader, own = rank(engine, number, readers, **model), HEADS // readers
        heads(reader, 0, own).fill_(0xEE)
        tokens, _ = reader.fetch(reader.query(TOKENS), SLOTS)
        assert tokens == len(TOKENS)
        expected = heads(whole, number * own, (number + 1) * own)
        assert torch.equal(heads(reader, 0, own), expected)


def test_page_without_a_shard_is_a_miss(engine: Any) -> None:
    model = {"revision": uuid.uuid4().hex}
    writer = rank(engine, 0, 1, **model)
    fill(writer.host)
    writer.backup(TOKENS, SLOTS)
    pages, keys = writer.backend._pages["kv"], writer.hashes(TOKENS)
    client = writer.backend._client
    assert client.remove(pages.namespaces[2], [bytes.fromhex(keys[1])]) == [True]
    reader = rank(engine, 0, 1, **model)
    assert reader.query(TOKENS).storage_hit_count == reader.page
    assert reader.backend.batch_get_v1(keys, SLOTS) == [True] + [False] * (len(keys) - 1)
    assert writer.backup(TOKENS, SLOTS).completed_tokens == len(TOKENS)
    assert reader.query(TOKENS).storage_hit_count == len(TOKENS)


def test_as_many_shards_as_ranks_are_the_pages_of_ranks(engine: Any) -> None:
    model = {"revision": uuid.uuid4().hex}
    with parallel(1, 2):
        by_rank = engine(mha("page_head", heads=2), **model)
        by_shard = engine(mha("page_head", heads=2), head_shards=2, **model)
    assert by_rank.backend._pages["kv"].namespaces == by_shard.backend._pages["kv"].namespaces
    fill(by_rank.host)
    by_rank.backup(TOKENS, SLOTS)
    tokens, slots = by_shard.prefetch(TOKENS)
    assert page_bytes(by_shard.host, slots[:tokens]) == page_bytes(by_rank.host, SLOTS)


def test_sglangs_own_option_is_the_number_of_shards(engine: Any) -> None:
    made = engine(mha("page_head", heads=4), tp_lcm_size=4)
    assert [space.tp_size for space in made.backend._pages["kv"].namespaces] == [4] * 4


def test_latents_are_not_cut(engine: Any) -> None:
    made = engine(mla(), head_shards=4)
    assert [space.tp_size for space in made.backend._pages["kv"].namespaces] == [1]


@pytest.mark.parametrize(
    ("layout", "shards", "message"),
    [
        ("page_first", 2, "head_shards=2 can not cut .* --hicache-mem-layout page_head"),
        ("page_head", 3, r"head_shards=3 does not fit 4 KV heads .* allowed are 1, 2, 4"),
        ("page_head", "all", r"option head_shards='all' is neither"),
    ],
)
def test_option_that_does_not_fit_is_refused(
    engine: Any, layout: str, shards: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(mha(layout, heads=4), head_shards=shards)
