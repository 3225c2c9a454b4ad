"""Try what an agent on a GPU needs of this host, for `kvstore doctor --gpu`.

    torch -> GPU -> CuPy and kernels -> page-locked memory -> another process's memory (CUDA IPC)

`python -m gpu_agent.worker.probe` uses as much GPU memory as two CUDA contexts, some hundreds of
MB, for a moment.
"""

import json
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu_agent.worker.ipc_memory import IpcEvents, described_storage, opened_memory
from kvstore.doctor.checks import Finding, ending, fail, ok, print_findings, skipped, warn
from kvstore.errors import ConfigError, KVStoreError

try:
    from gpu_agent.kernels.cuda import CudaDevice
except ImportError as error:  # neither extra, cuda12 nor cuda13, is installed
    CudaDevice = None  # type: ignore[assignment, misc]
    _missing = str(error)

log = logging.getLogger(__name__)

MIB = 1 << 20
LOCKED_NBYTES, SHARED_NBYTES = 64 * MIB, 2 * MIB
VALUE = 0x5A
OTHER_S = 60.0
READ = "the memory holds the right bytes"
IPC_REMEDY = (
    "run engine and agents in one container, with its default IPC and pid namespaces; or "
    "agents=threads"
)


def findings() -> Iterator[Finding]:
    """Yield findings about this host's GPU."""
    yield ok("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if not torch.cuda.is_available():
        remedy = (
            "a torch with CUDA, the driver (nvidia-smi), and of a container: --gpus, or the "
            "device plugin"
        )
        yield fail("GPU", "torch sees none", remedy)
        for name in ("CuPy", "page-locking", "CUDA IPC"):
            yield skipped(name, "not without a GPU")
        return
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield ok("GPU", ", ".join(names))
    yield from _kernels()
    yield _ipc(torch.device("cuda", 0))


def _kernels() -> Iterator[Finding]:
    """Yield findings about the kernels, made as an agent makes them, for the first GPU."""
    if CudaDevice is None:
        extra = f"cupy-cuda{(torch.version.cuda or '12').partition('.')[0]}x"
        yield warn(
            "CuPy", f"{_missing}: pages are moved by torch, which is slower", f"install {extra}"
        )
        yield skipped("page-locking", "not without CuPy")
        return
    try:
        device = CudaDevice(torch.device("cuda", 0))
    except Exception as error:  # an error of CuPy's compiler or loader, or of the driver
        log.debug("the kernels", exc_info=True)
        yield fail(
            "CuPy",
            f"the kernels can not be made: {error}",
            "install the CuPy of this torch's CUDA, and its headers",
        )
        yield skipped("page-locking", "not without the kernels")
        return
    yield ok("CuPy", "the kernels are compiled and run")
    yield _locking(device)


def _locking(device: Any) -> Finding:
    """Check that memory like a node's arena, a mapped memfd, can be page-locked."""
    fd = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, LOCKED_NBYTES)
        mapped = mmap.mmap(fd, LOCKED_NBYTES)
    finally:
        os.close(fd)
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    try:
        device.register(address, LOCKED_NBYTES)
        device.unregister(address)
    except ConfigError as error:
        remedy = (
            "raise the limit of locked memory (LimitMEMLOCK=infinity), or give the container "
            "IPC_LOCK"
        )
        return warn("page-locking", f"{error}: copies are slower", remedy)
    return ok("page-locking", f"{LOCKED_NBYTES // MIB} MiB of shared memory")


def _ipc(device: torch.device, command: Sequence[str] = ()) -> Finding:
    """Check that another process can map this one's memory, with the functions that the agents use.

    Its output counts, not its exit status: see `_judged`.
    """
    command = command or (sys.executable, "-X", "faulthandler", "-m", "gpu_agent.worker.probe")
    tensor = torch.full((SHARED_NBYTES,), VALUE, dtype=torch.uint8, device=device)
    inherited: list[int] = []
    try:
        events = IpcEvents(device)
        setup = {"device": str(device), "events": events.handles(), "event": events.record()}
        setup["storages"] = [described_storage(tensor.untyped_storage(), inherited)]
        other = subprocess.run(
            [*command, json.dumps(setup)],
            capture_output=True,
            text=True,
            timeout=OTHER_S,
            check=False,
            pass_fds=inherited,
        )
    except (KVStoreError, OSError, subprocess.TimeoutExpired) as error:
        return fail("CUDA IPC", str(error), IPC_REMEDY)
    return _judged(other.returncode, other.stdout, other.stderr)


def _judged(status: int, said: str, complained: str) -> Finding:
    """Return the finding for the other process.

    If it printed READ it has mapped the memory, however it ended afterwards. If it died before, the
    check fails and names the signal.
    """
    if READ in said.splitlines():
        note = f" ({ending(status)}, after it had read them)" if status else ""
        return ok("CUDA IPC", f"another process maps and reads memory of this one{note}")
    lines = [line for line in complained.splitlines() if line.strip()]
    if status >= 0:
        why = lines[-1] if lines else ending(status)
    else:  # the fault handler prints the stack, the innermost call first
        innermost = next((line.strip() for line in lines if line.startswith("  File ")), "")
        why = f"{ending(status)} before it had read it{': ' if innermost else ''}{innermost}"
    return fail("CUDA IPC", f"another process can not map this one's memory: {why}", IPC_REMEDY)


def _open(described: str) -> None:
    """Map the described memory in another process.

    Raises ConfigError for what can not be mapped, or holds something else.
    """
    setup = json.loads(described)
    events, (storage,) = opened_memory(setup)
    fence = events.fence(setup["event"])
    if fence is not None:
        torch.cuda.current_stream().wait_event(fence)
    nbytes = storage.nbytes()
    found = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (nbytes,), (1,)
    )
    if not bool((found == VALUE).all()):
        raise ConfigError("the memory that was mapped holds something else")
    print(READ, flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        _open(sys.argv[1])
        os._exit(0)  # as the worker process ends, without CUDA's shutdown
    else:
        print_findings(findings())
