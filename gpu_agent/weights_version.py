"""Number the versions of the weights, so that pages of earlier ones miss.

For engines that change weights while they run, or are told to forget. Pages stored before are not
removed: other engines with the same weights still use them, and a process that starts again with
the old weights finds them.

Ranks that share pages must reach the same epoch without communication, from the same order of
calls. So epochs are drawn from a seed that torch's ranks agree on once. The state belongs to the
process: an adapter that is closed and made again must not bring the old pages back.
"""

import hashlib
import logging
import secrets
import threading

import torch.distributed

log = logging.getLogger(__name__)

_STORE_KEY = "kvstore/epoch-seed"


class WeightsVersions:
    """Versions of the weights. Thread-safe.

    `seed`: equal on ranks that share pages, different in every launch.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._advances = 0

    def current(self, first: int) -> int:
        """Return `first` before any `advance`, then 63 random bits."""
        with self._lock:
            if not self._advances:
                return first
            digest = hashlib.sha256(f"{self._seed} {self._advances} {first}".encode()).digest()
            return int.from_bytes(digest[:8], "little") >> 1

    def advance(self) -> None:
        """Begin a new version."""
        with self._lock:
            self._advances += 1


_lock = threading.Lock()
_epochs: WeightsVersions | None = None


def process_epochs() -> WeightsVersions:
    """Return this process's versions.

    The first call may use torch's store, so it belongs into the start.
    """
    global _epochs
    with _lock:
        if _epochs is None:
            _epochs = WeightsVersions(_agreed_seed())
        return _epochs


def _agreed_seed() -> str:
    """Return a random seed, the same on all ranks of torch's default group, if there is one."""
    mine = secrets.token_hex(16)
    if not torch.distributed.is_initialized():
        return mine
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(_STORE_KEY, "", mine).decode())
    except (
        RuntimeError
    ) as error:  # only effect: after a clear, ranks do not find each other's pages
        log.warning(
            "ranks did not agree on an epoch, shared pages will miss after a clear: %s", error
        )
        return mine
