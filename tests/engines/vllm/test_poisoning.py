"""Nothing computed from blocks of a failed load is ever stored: R10 and the poisoning rule.

A prompt's head is in the store, but one of its pages is evicted between lookup and load, so the
load leaves garbage in its blocks. If these blocks were used, the pages computed from them would be
stored under valid keys, for all engines.
"""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import answers, cached, prompt
from engine_handle import EngineHandle
from restartable_node import RestartableNode

Engines = Callable[..., EngineHandle]
HEAD, TAIL = 96, 70
# The victim recomputes the failed blocks over several steps, so that a save one step late would
# still store garbage.
SLOWLY: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


def forget_tail(store: RestartableNode, before: dict[Any, bytes]) -> None:
    """Remove the pages that are not in `before`."""
    with store.client() as client:
        for namespace, _ in client.namespaces():
            names = [page.prefix_hash for page in client.list_pages(namespace)]
            new = [name for name in names if (namespace.digest, name) not in before]
            if new:
                assert all(client.remove(namespace, new))


def disturbed(
    writer: EngineHandle, victim: EngineHandle, store: RestartableNode, seed: int, **fault: Any
) -> tuple[list[Any], list[Any], dict[str, int]]:
    """Let a load of the victim fail, and compare the store with that of an undisturbed run.

    Return the victim's answers, those of a clean process, and the victim's numbers of calls.
    """
    whole = prompt(seed, HEAD + TAIL)
    writer.reset()
    writer.generate(whole[: HEAD + 1], max_tokens=1)
    writer.settle()
    before = store.pages()
    writer.generate(whole)
    writer.settle()
    undisturbed = store.pages()
    forget_tail(store, before)

    victim.reset()
    victim.struck()
    victim.arm("load", "forget", **fault)
    found = victim.generate(whole)
    victim.settle()
    report = victim.ask("report")["processes"]
    assert [strike for process in report for strike in process["struck"]] == ["forget at load"]
    calls = {"lookup": sum(process["calls"].get("lookup", 0) for process in report)}

    after = store.pages()
    assert after.keys() == undisturbed.keys(), "the missing page or the tail is not stored again"
    wrong = [name.hex() for (_, name), page in undisturbed.items() if after[_, name] != page]
    assert wrong == [], "pages differ from those of an undisturbed run"
    clean = writer.alone(whole)
    assert cached(clean) == [160]
    return answers(found), answers(clean), calls


@pytest.fixture(scope="module")
def writer(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("writer", model=models("llama"), store={"address": store.address})


@pytest.fixture(scope="module")
def victim(engines: Engines, models: Callable[..., str], store: RestartableNode) -> EngineHandle:
    return engines("victim", model=models("llama"), store={"address": store.address}, **SLOWLY)


@pytest.mark.parametrize("page", [0, 1, 2])
def test_page_evicted_between_lookup_and_load_poisons_nothing(
    page: int,
    plain: Engines,
    writer: EngineHandle,
    victim: EngineHandle,
    store: RestartableNode,
    request: pytest.FixtureRequest,
) -> None:
    """With the first page missing, the engine asks its connector again before it computes anything.

    It must not get the same hit again and again.
    """
    seed = 1 + page + 10 * len(request.node.name)
    expected = answers(plain().alone(prompt(seed, HEAD + TAIL)))
    found, clean, calls = disturbed(writer, victim, store, seed, page=page)
    assert found == expected
    assert clean == expected
    assert calls["lookup"] < 10


TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("page", [0, 1])
def test_failed_load_of_one_rank_poisons_nothing(
    page: int, plain: Engines, engines: Engines, models: Callable[..., str], store: RestartableNode
) -> None:
    """Rank 0 has loaded all blocks and rank 1 has not; neither may compute from them."""
    writer = engines("two ranks", model=models("llama"), store={"address": store.address}, **TWO)
    victim = engines(
        "two ranks, victim",
        model=models("llama"),
        store={"address": store.address},
        **TWO,
        **SLOWLY,
    )
    expected = answers(plain(**TWO).alone(prompt(900 + page, HEAD + TAIL)))
    found, clean, calls = disturbed(writer, victim, store, 900 + page, page=page, tp_rank=1)
    assert found == expected
    assert clean == expected
    assert calls["lookup"] < 30
