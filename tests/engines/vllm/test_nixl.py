"""Two real engines with NIXL and the store in a `MultiConnector`; needs `pip install nixl`.

NIXL hands prompts over from engine to engine, over TCP. What it is not asked for, the store brings.
"""

from collections.abc import Callable
from typing import Any

import pytest
from engine_answers import answers, prompt
from engine_handle import EngineHandle
from ports import free_port
from restartable_node import RestartableNode
from vllm_server import REMOTE_DECODE, store_config

pytest.importorskip("nixl")
PATIENT = {"lookup_timeout_s": 30.0, "load_timeout_s": 60.0, "handover_wait_s": 60.0}
# The engine's loop runs by itself in a process, so that NIXL's blocks are released.
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "UCX_TLS": "tcp,sm,self"}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


def counted(engine: EngineHandle) -> dict[str, Any]:
    found = engine.ask("metrics")
    names = {
        "tickets": "kvstore_handovers",
        "hits": "kvstore_hits",
        "transfers": "nixl_xfer_time_seconds",
    }
    return {name: found.get(f"vllm:{series}", 0) for name, series in names.items()}


@pytest.mark.parametrize("order", ["first", "last"])
def test_each_connector_brings_its_prompts(
    order: str,
    plain: Callable[..., EngineHandle],
    models: Callable[..., str],
    store: RestartableNode,
) -> None:
    ours = store_config(store.address, slow_hits="take", **PATIENT)
    connectors = [ours, NIXL] if order == "first" else [NIXL, ours]
    config = {
        **NIXL,
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    arguments = {"model": models("llama"), "kv_transfer_config": config}
    prefill, decode = (
        EngineHandle(name, arguments, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()), **VARIABLES)
        for name in ("prefill", "decode")
    )
    try:
        for number, by_ticket in enumerate((False, False, True)):
            whole = prompt(9100 + 10 * len(order) + number, 100)
            (before,) = prefill.generate(whole, max_tokens=1, transfer=REMOTE_DECODE)
            transfer = before["transfer"]
            assert transfer["do_remote_prefill"]
            if by_ticket:  # a proxy that passes nothing else on
                transfer = {"kvstore.ticket": transfer["kvstore.ticket"]}
            found = decode.generate(whole, transfer=transfer)
            assert answers(found) == answers(plain().alone(whole))
            counts = counted(decode)
            assert counts["tickets"] == by_ticket
            assert counts["hits"] + counts["transfers"] == number + 1
            if order == "last":  # the first connector that has a prompt brings it
                assert counts["hits"] == by_ticket
    finally:
        for engine in (prefill, decode):
            engine.end()
        for engine in (prefill, decode):
            engine.close()
