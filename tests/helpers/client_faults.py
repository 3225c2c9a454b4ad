"""Random faults between an adapter and the store, injected into the adapter's client.

A page is removed or damaged between lookup and load. A load fails with its buffers untouched or
written. A save fails with its pages stored or not. Only the client's methods are wrapped; the
adapter and the engine are unchanged.
"""

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import Client, ClientConfig, KVStoreError, Unavailable

LOADS, SAVES = ("get", "open_get"), ("put", "open_put")


class ClientFaults:
    """Faults for the calls of one or more clients.

    `share`: the share of calls with a fault; 0 disables faults. `struck`: the count of each fault.
    Adapters call from several threads; any order of faults will do, so there is no lock.
    """

    def __init__(self, address: str, rng: random.Random) -> None:
        self.share = 0.3
        self.struck: collections.Counter[str] = collections.Counter()
        self._rng = rng
        self._client = Client(
            ClientConfig(address=address, wire="shm", timeout_s=2.0, backoff_s_max=0.1)
        )

    def watch(self, client: Client) -> None:
        for name in LOADS:
            setattr(client, name, self._before(getattr(client, name), self._of_load))
        for name in SAVES:
            setattr(client, name, self._before(getattr(client, name), self._of_save))

    def close(self) -> None:
        self._client.close()

    def _before(self, method: Callable[..., Any], fault: Callable[..., str]) -> Callable[..., Any]:
        def call(namespace: Any, keys: Sequence[bytes], *arguments: Any, **options: Any) -> Any:
            what = fault(namespace, keys) if keys and self._rng.random() < self.share else ""
            self.struck[what or "none"] += 1
            if what == "refused":
                raise Unavailable("call refused by the test")
            result = method(namespace, keys, *arguments, **options)
            # Slots in the node's memory must be released by the caller, so they are never lost
            if what == "lost" and not hasattr(result, "__enter__"):
                raise Unavailable("answer lost by the test")
            return result

        return call

    def _of_load(self, namespace: Any, keys: Sequence[bytes]) -> str:
        what = self._rng.choice(("forgotten", "forgotten", "damaged", "refused", "lost"))
        some = self._rng.sample(list(keys), self._rng.randrange(1, len(keys) + 1))
        try:
            if what == "forgotten":
                self._client.remove(namespace, some)
            elif what == "damaged":
                self._damage(namespace, some[0])
        except KVStoreError:
            return "none"  # the node hangs
        return what

    def _damage(self, namespace: Any, key: bytes) -> None:
        """Flip one bit of a page in the node's memory without the node noticing."""
        with self._client.open_get(namespace, [key]) as slots:
            if slots.offsets and slots.offsets[0] is not None:
                position = slots.offsets[0] + self._rng.randrange(namespace.layout.page_nbytes)
                slots.arena.memory[position] ^= 1 << self._rng.randrange(8)

    def _of_save(self, namespace: Any, keys: Sequence[bytes]) -> str:
        return self._rng.choice(("refused", "lost"))
