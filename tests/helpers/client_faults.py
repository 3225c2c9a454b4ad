"""Random faults between an adapter and the store: what a test's client does to the calls of an
adapter's.

A page is gone between lookup and load, or damaged; a load ends with an error, with its buffers
untouched or written; a save ends with an error, with its pages stored or not. The adapter and the
engine know nothing of this: only the methods of their client are wrapped.
"""

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

from kvstore import Client, ClientConfig, KVStoreError, Unavailable

LOADS, SAVES = ("get", "open_get"), ("put", "open_put")


class ClientFaults:
    """Thread-safe as far as needed: adapters call from several threads, and any order of faults
    will do.

    `share`: of the calls that something happens to; 0 ends it. `struck`: how often each fault has
    happened.
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
                raise Unavailable("the test refuses this call")
            result = method(namespace, keys, *arguments, **options)
            # Places in the node's memory must be given back
            if what == "lost" and not hasattr(result, "__enter__"):
                raise Unavailable("the test loses this answer")
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
            return "none"  # the node hangs just now
        return what

    def _damage(self, namespace: Any, key: bytes) -> None:
        """Flip a bit of a page in the node's memory, behind its back."""
        with self._client.open_get(namespace, [key]) as slots:
            if slots.offsets and slots.offsets[0] is not None:
                position = slots.offsets[0] + self._rng.randrange(namespace.layout.page_nbytes)
                slots.arena.memory[position] ^= 1 << self._rng.randrange(8)

    def _of_save(self, namespace: Any, keys: Sequence[bytes]) -> str:
        return self._rng.choice(("refused", "lost"))
