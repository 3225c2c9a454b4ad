"""Loads that are awaited together, layer by layer."""

import concurrent.futures

from gpu_agent.load_pipeline import LoadResult
from gpu_agent.lookup_cache import LayerBatch


class Recorder:
    def __init__(self, loads: int) -> None:
        self.ready: list[int] = []
        self.errors: list[str] = []
        self.batch = LayerBatch(
            [4, 5], loads, self.ready.append, lambda error: self.errors.append(str(error))
        )


def done_load(pages: int, error: str | None = None) -> "concurrent.futures.Future[LoadResult]":
    done: concurrent.futures.Future[LoadResult] = concurrent.futures.Future()
    done.set_result(LoadResult(pages, pages, error))
    return done


def test_layer_is_ready_when_all_loads_have_it() -> None:
    recorder = Recorder(2)
    recorder.batch.placed(4, None)
    assert recorder.ready == []
    recorder.batch.placed(5, None)
    recorder.batch.placed(4, None)
    assert recorder.ready == [4]
    recorder.batch.placed(5, None)
    assert recorder.ready == [4, 5]
    recorder.batch.loaded(3, done_load(3))
    assert recorder.errors == []


def test_partial_load_fails_the_batch_once() -> None:
    recorder = Recorder(3)
    recorder.batch.placed(4, None)
    recorder.batch.loaded(3, done_load(1, "the node is away"))
    recorder.batch.loaded(3, done_load(2))
    assert recorder.errors == ["1 of 3 pages: the node is away"]
    for _ in range(2):
        recorder.batch.placed(4, None)
    assert recorder.ready == []


def test_miss_has_an_error_message() -> None:
    recorder = Recorder(1)
    recorder.batch.loaded(3, done_load(0))
    assert recorder.errors == ["0 of 3 pages: the rest is missing"]
