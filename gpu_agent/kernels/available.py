"""Choose the transfer for a device."""

import logging
import threading

import torch

from gpu_agent.transfer import TorchTransfer, Transfer
from kvstore.errors import ConfigError

try:
    from gpu_agent.kernels.cuda import CudaTransfer
except ImportError as error:  # neither extra, cuda12 nor cuda13, is installed; CPU pools do without
    CudaTransfer = None  # type: ignore[assignment, misc]
    _missing = str(error)

log = logging.getLogger(__name__)

_lock = threading.Lock()
_made: dict[torch.device, Transfer] = {}


def transfer_for(device: torch.device) -> Transfer:
    """Return the fastest transfer for pools on `device`.

    All agents of a process share one per GPU, which holds 64 MiB of its memory. Without CuPy, or
    without memory, it is plain torch.
    """
    if device.type != "cuda":
        return TorchTransfer()
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    with _lock:
        if device not in _made:
            _made[device] = _make(device)
        return _made[device]


def _make(device: torch.device) -> Transfer:
    if CudaTransfer is None:
        log.warning(
            "moving pages by torch, which is slower: %s (install cupy-cuda12x or cupy-cuda13x)",
            _missing,
        )
        return TorchTransfer()
    try:
        return CudaTransfer(device)
    except ConfigError as error:
        log.warning("moving pages by torch, which is slower: %s", error)
        return TorchTransfer()
