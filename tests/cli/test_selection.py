"""Parsing of tokens, durations, sizes and keys that users type."""

from pathlib import Path
from typing import Any

import pytest

from kvstore import Namespace, opaque_layout
from kvstore.cli.exits import Failure
from kvstore.cli.output import human_ms, human_nbytes, percent
from kvstore.cli.selection import (
    check_hex,
    find_namespace,
    hash_tokens,
    option_seconds,
    parse_tokens,
    read_tokens,
    whole_key,
)
from kvstore.errors import InvalidRequest
from kvstore.results import NamespaceInfo


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", " 1,\n2 ,3\n", "[1, 2, 3]", "\n[1,2,3]\n"])
def test_token_ids_are_parsed_in_every_form(text: str) -> None:
    assert parse_tokens(text, "--tokens") == [1, 2, 3]


@pytest.mark.parametrize(
    "text", ["1,x", "-1", "1.5", "[1, true]", "[1, [2]]", "[1", "[" * 100_000, "١"]
)
def test_invalid_tokens_are_refused_with_their_source(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt_file"):
        parse_tokens(text, "prompt_file")


def test_tokens_from_two_sources_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_text("4 5")
    assert read_tokens(None, path) == [4, 5]
    assert read_tokens(None, None) is None
    with pytest.raises(InvalidRequest, match="not both"):
        read_tokens("1", path)


def test_tokens_that_fill_no_page_are_refused() -> None:
    assert len(hash_tokens([1, 2, 3, 4, 5], 2)) == 2
    with pytest.raises(
        InvalidRequest, match="3 tokens fill no page; a page of this namespace has 4"
    ):
        hash_tokens([1, 2, 3], 4)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("30min", 1800), ("1h", 3600), ("7d", 604800)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert option_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1s", "1 year", "h", "1h30m"])
def test_invalid_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write for example"):
        option_seconds(text)


@pytest.mark.parametrize("text", ["", "xyz", "0x12", "12 ", "ab" * 65])
def test_invalid_hex_of_a_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="key"):
        check_hex(text, "key")


def test_only_16_to_64_bytes_are_a_whole_key() -> None:
    assert whole_key("ab" * 16) == bytes.fromhex("ab" * 16)
    assert whole_key("ab" * 64) is not None
    assert [whole_key(text) for text in ("ab" * 15, "ab" * 16 + "c", "ab" * 65)] == [
        None,
        None,
        None,
    ]


def test_figures_are_formatted_for_people() -> None:
    assert [human_nbytes(n) for n in (0, 1023, 1536, 1 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 TiB",
    ]
    assert [human_ms(n) for n in (0, 999, 1500, 90_000, 7_200_000, 172_800_000)] == [
        "0 ms",
        "999 ms",
        "1.5 s",
        "1.5 min",
        "2.0 h",
        "2.0 d",
    ]
    assert [percent(1, 3), percent(0, 0)] == ["33.3 %", "-"]


class Listing:
    """A fake client with namespaces: 'a' has pages on disk only, 'b' none, 'c' some in RAM."""

    def __init__(self, models: str) -> None:
        counts: dict[str, dict[str, Any]] = {
            "a": {"disk_page_count": 3},
            "b": {},
            "c": {"page_count": 2},
        }
        self._known = [
            (space, NamespaceInfo(space.digest, space, **counts[space.model]))
            for space in (Namespace(m, opaque_layout(512)) for m in models)
        ]

    def namespaces(self) -> list[tuple[Namespace, NamespaceInfo]]:
        return self._known


@pytest.mark.parametrize(
    ("models", "found"), [("ab", "a"), ("bc", "c"), ("b", "b"), ("ac", ""), ("bb", "")]
)
def test_only_namespace_with_pages_is_the_default(models: str, found: str) -> None:
    client: Any = Listing(models)
    if found:
        assert find_namespace(client, None, None)[0].model == found
    else:
        with pytest.raises(Failure, match="2 namespaces fit"):
            find_namespace(client, None, None)
