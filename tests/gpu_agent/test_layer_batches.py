"""Loads that are waited for as one, layer by layer."""

import concurrent.futures

from gpu_agent.load_pipeline import LoadResult
from gpu_agent.lookup_cache import LayerBatch


class Told:
    def __init__(self, loads: int) -> None:
        self.ready: list[int] = []
        self.errors: list[str] = []
        self.batch = LayerBatch(
            [4, 5], loads, self.ready.append, lambda error: self.errors.append(str(error))
        )


def over(pages: int, error: str | None = None) -> "concurrent.futures.Future[LoadResult]":
    done: concurrent.futures.Future[LoadResult] = concurrent.futures.Future()
    done.set_result(LoadResult(pages, pages, error))
    return done


def test_a_layer_is_ready_when_the_last_load_has_it() -> None:
    told = Told(2)
    told.batch.placed(4, None)
    assert told.ready == []
    told.batch.placed(5, None)
    told.batch.placed(4, None)
    assert told.ready == [4]
    told.batch.placed(5, None)
    assert told.ready == [4, 5]
    told.batch.loaded(3, over(3))
    assert told.errors == []


def test_a_load_that_ends_early_fails_all_once() -> None:
    told = Told(3)
    told.batch.placed(4, None)
    told.batch.loaded(3, over(1, "the node is away"))
    told.batch.loaded(3, over(2))
    assert told.errors == ["1 of 3 pages: the node is away"]
    for _ in range(2):
        told.batch.placed(4, None)
    assert told.ready == []


def test_a_plain_miss_has_words_too() -> None:
    told = Told(1)
    told.batch.loaded(3, over(0))
    assert told.errors == ["0 of 3 pages: the rest is missing"]
