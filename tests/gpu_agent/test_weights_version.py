"""Epochs of a process: each advance gives a new one, equal on ranks with the same seed."""

import os
import subprocess
import sys

from ports import free_port

from gpu_agent.weights_version import WeightsVersions

# Torch is imported once, before the fork, since the import takes longer than all else.
_RANKS = """
import os, sys, torch.distributed as dist
from gpu_agent.weights_version import process_epochs
other = os.fork()
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1 if other else 0, world_size=2)
epochs = process_epochs()
assert epochs is process_epochs()
epochs.advance()
os.write(1, b"%d\\n" % epochs.current(7))
dist.barrier()
if other:
    assert os.waitpid(other, 0)[1] == 0
"""


def test_epoch_is_the_configured_one_until_the_first_advance() -> None:
    epochs = WeightsVersions("seed")
    assert epochs.current(7) == 7
    epochs.advance()
    assert epochs.current(7) != 7
    assert epochs.current(7) == epochs.current(7)


def test_epochs_never_repeat() -> None:
    epochs, seen = WeightsVersions("seed"), {0, 1}
    for _ in range(100):
        epochs.advance()
        now = {epochs.current(0), epochs.current(1)}
        assert all(0 <= epoch < 1 << 63 for epoch in now)
        assert len(now) == 2
        assert not now & seen
        seen |= now


def test_epochs_depend_on_the_seed() -> None:
    same, twin, other = WeightsVersions("a"), WeightsVersions("a"), WeightsVersions("b")
    for epochs in (same, twin, other):
        epochs.advance()
    assert same.current(0) == twin.current(0) != other.current(0)


def test_ranks_agree_through_torchs_store() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"

    done = subprocess.run(
        [sys.executable, "-c", _RANKS, address],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        timeout=120,
        check=True,
    )
    first, second = done.stdout.split()
    assert first == second != "7"
