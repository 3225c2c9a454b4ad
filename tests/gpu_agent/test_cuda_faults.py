"""A process dies while the GPU's copy engine writes into the node's memory.

Needs a GPU and CuPy.
"""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
import torch

from kvstore import Client, ClientConfig, Namespace, PutOutcome, opaque_layout, prefix_hashes
from kvstore.tools.node_process import NodeProcess
from kvstore.tools.trace import page_content

pytest.importorskip("cupy", reason="needs CuPy")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PAGE_NBYTES = 8 << 20
PAGES = 16
ROUNDS = 12
WAIT_S = 60.0

# Reserves slots and lets the copy engine write into them repeatedly, until it is killed.
VICTIM = """
import sys
import torch
from gpu_agent.kernels.cuda import CudaTransfer
from gpu_agent.kernels.arena_lock import address_of
from kvstore import Client, ClientConfig, Namespace, opaque_layout, prefix_hashes

address, name, page_nbytes, pages = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = Client(ClientConfig(address=address, wire="shm", timeout_s=30.0))
namespace = Namespace(model=name, layout=opaque_layout(page_nbytes))
source = torch.full((pages, page_nbytes), 0xBD, dtype=torch.uint8, device="cuda")
transfer = CudaTransfer()
with client.open_put(namespace, prefix_hashes(list(range(pages)), 1)) as slots:
    transfer.register_host(address_of(slots.arena.memory), slots.arena.nbytes)
    targets = [
        torch.frombuffer(slots.arena.memory, dtype=torch.uint8, count=page_nbytes, offset=offset)
        for offset in slots.offsets
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    print("copying", flush=True)
    while True:
        for number, target in enumerate(targets):
            with torch.cuda.stream(streams[number % 2]):
                target.copy_(source[number], non_blocking=True)
        if streams[0].query() is None:
            break
"""


def test_slots_of_a_killed_process_are_freed_after_its_copies() -> None:
    """The node has room only for the victim's pages, so the next writer gets the same slots once
    freed.

    A copy of the dead process that is still running would damage its pages.
    """
    flags = ("--ram-bytes", str(PAGES * PAGE_NBYTES), "--extent-bytes", str(PAGE_NBYTES))
    with (
        NodeProcess(
            *flags, "--batch-bytes-max", str(PAGES * PAGE_NBYTES), "--log-level", "ERROR"
        ) as node,
        Client(ClientConfig(address=node.address, wire="shm", timeout_s=WAIT_S)) as client,
    ):
        for number in range(ROUNDS):
            kill_in_flight(node)
            namespace = Namespace(
                model=f"after {number} {uuid.uuid4()}", layout=opaque_layout(PAGE_NBYTES)
            )
            keys = prefix_hashes(list(range(PAGES)), 1)
            pages = [page_content(namespace.digest, key, PAGE_NBYTES) for key in keys]
            end = time.monotonic() + WAIT_S
            while client.node_status().ram.writing_count:
                assert time.monotonic() < end, "the dead process's slots were not freed"
            assert client.put(namespace, keys, pages) == [PutOutcome.STORED] * PAGES
            buffers = [bytearray(PAGE_NBYTES) for _ in keys]
            for _ in range(3):
                assert client.get(namespace, keys, buffers) == [True] * PAGES
                assert buffers == pages, "bytes changed after they were stored"
            client.remove(namespace, keys)
        assert client.stats.corrupt_pages == 0


def kill_in_flight(node: NodeProcess) -> None:
    arguments = (node.address, f"victim {uuid.uuid4()}", str(PAGE_NBYTES), str(PAGES))
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    assert victim.stdout.readline() == "copying\n"
    time.sleep(0.05)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
