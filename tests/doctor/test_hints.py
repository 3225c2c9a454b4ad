"""R15: hints explain the cause of a zero hit rate."""

import dataclasses
from typing import Any

import pytest

from kvstore import LayerGroup, Namespace, PageLayout, Plane
from kvstore.cli.nodes import MISS_REASONS
from kvstore.doctor.pages import _CAUSES, differences, hints
from kvstore.results import Counters, NamespaceInfo


def layout(
    dtype: str = "bfloat16", page_tokens: int = 16, heads: int = 8, layers: int = 2
) -> PageLayout:
    planes = (Plane("k", dtype, (heads, 128)), Plane("v", dtype, (heads, 128)))
    return PageLayout(page_tokens, (LayerGroup("kv", tuple(range(layers)), planes),))


WRITER = Namespace("llama", layout(), revision="main", tp_size=2)


def info(page_count: int = 0, **counters: int) -> NamespaceInfo:
    return NamespaceInfo(
        WRITER.digest, WRITER, page_count=page_count, counters=Counters(**counters)
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tp_size": 4}, "tp_size (4, there 2)"),
        ({"revision": ""}, "revision (empty, there main)"),
        ({"salt": "lora-7"}, "salt (lora-7, there empty)"),
        ({"epoch": 3}, "epoch (3, there 0)"),
        ({"tenant": "b"}, "tenant (b, there default)"),
        ({"layout": layout(page_tokens=32)}, "page_tokens (32, there 16)"),
        ({"layout": layout(dtype="float16")}, "layout.kv.k.dtype (float16, there bfloat16)"),
        ({"layout": layout(heads=4)}, "layout.kv.v.unit_shape (4x128, there 8x128)"),
        ({"layout": layout(layers=3)}, "layout.kv.layers (0..2, there 0..1)"),
    ],
)
def test_r15_hint_names_the_field_in_which_reader_and_writer_differ(
    change: dict[str, Any], text: str
) -> None:
    reader = dataclasses.replace(WRITER, **change)
    known = [
        (WRITER, info(page_count=7, pages_asked=3, prefix_hits=3)),
        (reader, info(pages_asked=40, miss_absent=40)),
    ]
    (hint,) = hints(known)
    assert text in hint
    assert f"llama [{reader.digest.hex()[:12]}]: 0 of 40 pages asked hit" in hint
    assert f"[{WRITER.digest.hex()[:12]}] of the same model holds 7 pages" in hint


def test_r15_hint_names_the_writer_with_the_fewest_differences() -> None:
    reader = dataclasses.replace(WRITER, salt="x")
    far = dataclasses.replace(WRITER, tp_size=8, revision="old", layout=layout("float16"))
    known = [
        (far, info(page_count=9)),
        (WRITER, info(page_count=1)),
        (reader, info(pages_asked=1, miss_absent=1)),
    ]
    (hint,) = hints(known)
    assert WRITER.digest.hex()[:12] in hint
    assert far.digest.hex()[:12] not in hint


def test_hint_compares_with_namespaces_of_the_same_model_only() -> None:
    other = dataclasses.replace(WRITER, model="qwen")
    reader = (WRITER, info(page_count=3, pages_asked=5, miss_evicted=5))
    (hint,) = hints([(other, info(page_count=9)), reader])
    assert "of the same model" not in hint
    assert "evicted" in hint


def test_hint_with_few_differences_shows_all() -> None:
    reader = dataclasses.replace(WRITER, tenant="b", revision="r", tp_size=4, salt="s")
    (hint,) = hints([(WRITER, info(page_count=1)), (reader, info(pages_asked=1, miss_absent=1))])
    assert "more" not in hint


def test_hint_with_many_differences_counts_the_rest() -> None:
    reader = Namespace("llama", layout("float16", 32, 4, 3), tenant="b", revision="r", tp_size=4)
    (hint,) = hints([(WRITER, info(page_count=1)), (reader, info(pages_asked=1, miss_absent=1))])
    assert f"and {len(differences(reader, WRITER)) - 4} more" in hint


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        ({"miss_absent": 5}, "never stored"),
        ({"miss_absent": 2, "miss_evicted": 3}, "evicted"),
        ({"miss_removed": 5}, "removed by a caller"),
        ({"miss_corrupt": 5}, "checksum"),
        ({"miss_writing": 5}, "still being written"),
        ({"miss_expired": 5}, "time to live"),
        ({"pages_hit": 4, "miss_evicted": 1}, "not the first one of each request"),
    ],
)
def test_r15_hint_without_a_writer_explains_the_most_common_miss(
    counters: dict[str, int], text: str
) -> None:
    (hint,) = hints([(WRITER, info(pages_asked=5, **counters))])
    assert text in hint


def test_namespaces_with_hits_or_without_lookups_get_no_hint() -> None:
    other = dataclasses.replace(WRITER, salt="x")
    assert hints([(WRITER, info(pages_asked=5, prefix_hits=1)), (other, info(page_count=3))]) == []


def test_namespace_without_pages_is_not_a_writer() -> None:
    reader = dataclasses.replace(WRITER, salt="x")
    (hint,) = hints([(WRITER, info(page_count=0)), (reader, info(pages_asked=1, miss_absent=1))])
    assert "differs" not in hint


def test_r15_hint_names_a_writer_with_pages_on_disk_only() -> None:
    """A writer whose pages are on disk only, as after a restart, is named in the hint."""
    reader = dataclasses.replace(WRITER, salt="x")
    on_disk = dataclasses.replace(info(), disk_page_count=7)
    (hint,) = hints([(WRITER, on_disk), (reader, info(pages_asked=1, miss_absent=1))])
    assert "of the same model holds 7 pages but differs in salt (x, there empty)" in hint


def test_r15_every_miss_reason_is_explained_and_shown() -> None:
    reasons = {
        field.name for field in dataclasses.fields(Counters) if field.name.startswith("miss_")
    }
    assert reasons == set(_CAUSES) == {f"miss_{reason}" for reason in MISS_REASONS}
