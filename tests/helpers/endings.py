"""Terminate or kill SGLang engines, and check what they leave behind."""

import os
import signal
import time

import torch
from processes import GONE_S, children, wait_gone
from sglang_handle import SGLangHandle

# SGLang's message about a scheduler that does not exit within 15 s
STRAGGLERS = "killing them before they released"
# The least GPU memory that a process with a CUDA context uses
CONTEXT_NBYTES = 300 << 20


def ended(engine: SGLangHandle, number: signal.Signals) -> None:
    """Send a signal to an engine, and check that its processes exit and its GPU memory is freed.

    After SIGTERM, all processes must exit by themselves, without a traceback through our code.
    """
    engine.reset()
    processes = children(engine.pid)
    assert len(processes) >= 2, "the scheduler or the detokenizer is not running"
    free_before, _ = torch.cuda.mem_get_info()
    os.kill(engine.pid, number)
    wait_gone([engine.pid, *processes])
    end = time.monotonic() + GONE_S
    while torch.cuda.mem_get_info()[0] < free_before + CONTEXT_NBYTES:
        assert time.monotonic() < end, "GPU memory is not freed"
        time.sleep(0.05)
    if number is signal.SIGTERM:
        assert STRAGGLERS not in engine.said()
        assert "/gpu_agent/" not in engine.said(), "a traceback went through our code"
