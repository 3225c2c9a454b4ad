"""Engines that are told to end, or killed, and what is left of them."""

import os
import signal
import time

import torch
from processes import GONE_S, children, wait_gone
from sglang_handle import SGLangHandle

STRAGGLERS = (
    "killing them before they released"  # SGLang of a scheduler that does not end within 15 s
)
# Of the GPU's memory, the least that a process with a CUDA context takes
CONTEXT_NBYTES = 300 << 20


def ended(engine: SGLangHandle, number: signal.Signals) -> None:
    """All of its processes are gone and the GPU's memory is given back; one that was told to end
    did so by itself.
    """
    engine.reset()
    processes = children(engine.pid)
    assert len(processes) >= 2, "SGLang's scheduler and its detokenizer"
    free_before, _ = torch.cuda.mem_get_info()
    os.kill(engine.pid, number)
    wait_gone([engine.pid, *processes])
    end = time.monotonic() + GONE_S
    while torch.cuda.mem_get_info()[0] < free_before + CONTEXT_NBYTES:
        assert time.monotonic() < end, "GPU memory is not given back"
        time.sleep(0.05)
    if number is signal.SIGTERM:
        assert STRAGGLERS not in engine.said()
        assert "/gpu_agent/" not in engine.said(), "a traceback went through us"
