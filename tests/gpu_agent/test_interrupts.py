"""Restore interrupts after a compiler has changed signal handling.

Regression: a waiting main thread did not see signals.
"""

import signal
import subprocess
import sys

from gpu_agent.kernels import interrupts

ENGINE = """
import os, queue, runpy, signal, sys, threading, time

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

def main_thread():  # its state, and how often it has slept
    with open(f"/proc/self/task/{os.getpid()}/status") as status:
        lines = dict(line.split(":\\t", 1) for line in status)
    return lines["State"][0], lines["voluntary_ctxt_switches"]

def terminate():
    before = None
    while main_thread() != before or before[0] != "S":  # until it waits
        before = main_thread()
        time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(sys.argv[3]))
    print("ignored", flush=True)
    os._exit(0)

threading.Thread(target=terminate, daemon=True).start()
requests.get()
"""


def test_waiting_engine_obeys_sigterm_after_kernels_were_compiled() -> None:
    outputs = {}
    for how, patience_s in (("kept", "60"), ("left", "2")):
        command = [sys.executable, "-c", ENGINE, how, interrupts.__file__, patience_s]
        outputs[how] = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    assert outputs == {"kept": "obeyed", "left": "ignored"}


def test_signals_without_a_python_handler_are_unchanged() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with interrupts.interrupts_kept():
        pass
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
