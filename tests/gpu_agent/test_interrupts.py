"""Restore interrupts after a compiler has changed signal handling.

Regression: a waiting main thread did not see signals.
"""

import signal
import subprocess
import sys
import textwrap

from gpu_agent.kernels import interrupts

ENGINE = """
import os, queue, runpy, signal, sys, threading

# Without torch, which takes seconds.
interrupts_kept = runpy.run_path(sys.argv[2])["interrupts_kept"]

requests = queue.Queue()
signal.signal(signal.SIGTERM, lambda *_: (print("obeyed", flush=True), os._exit(0)))

def compiled():  # what NVRTC leaves behind
    signal.siginterrupt(signal.SIGTERM, False)

if sys.argv[1] == "kept":
    with interrupts_kept():
        compiled()
else:
    compiled()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
threading.Timer(3.0, lambda: (print("ignored", flush=True), os._exit(0))).start()
requests.get()
"""


def test_waiting_engine_obeys_sigterm_after_kernels_were_compiled() -> None:
    outputs = {}
    for how in ("kept", "left"):
        command = [sys.executable, "-c", textwrap.dedent(ENGINE), how, interrupts.__file__]
        outputs[how] = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    assert outputs == {"kept": "obeyed", "left": "ignored"}


def test_signals_without_a_python_handler_are_unchanged() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with interrupts.interrupts_kept():
        pass
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
