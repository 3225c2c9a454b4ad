"""Index KV events by the rules of llm-d's and Dynamo's routers, written down from their code.

Read in September 2026: llm-d-router (`pkg/kvevents/pool.go`, `pkg/kvcache/kvblock_scorer.go`,
`pkg/kvcache/backend.go`, `pkg/kvcache/kvblock/pseudo_pod.go`) and dynamo (`lib/kv-router/src/
zmq_wire/convert.rs` and `filter.rs`, `protocols.rs`). Events are the maps of vLLM's and SGLang's
wire. Both attribute an event to its publisher, and differ in what they do with the rest:

    medium, locality       llm-d                             Dynamo
    GPU                    weight 1.0                        device
    CPU                    weight 0.8                        host
    STORAGE, LOCAL         weight 1.0, as any unknown one    disk of the publisher
    STORAGE, REMOTE        weight 1.0: locality is not read  dropped
    unknown                weight 1.0                        dropped

llm-d's own index was run beside a bridge in November 2026, and did the same.

Dynamo 1.6.1 drops blocks with an ownership, too, and those whose hashes are no numbers. It reads a
store of its own kind: the stream of Mooncake's master (`lib/llm/src/kv_router/shared_cache.rs`).
`make test-dynamo` asks the real one.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

MAIN_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
LLMD_WEIGHTS = {"gpu": 1.0, "cpu": 0.8, "lmcache-l1": 0.8}
LLMD_WEIGHT_UNKNOWN = 1.0
DYNAMO_TIERS: Mapping[str | None, str] = {
    **dict.fromkeys(("GPU", "DEVICE", None), "device"),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), "host"),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), "disk"),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), "external"),
}


class LlmdIndex:
    """llm-d's index of one model: blocks of `block_tokens` tokens, and which pods have them.

    A pod whose name begins with `pool:` stands for every pod: as proposed for llm-d (2586).
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[bytes, set[tuple[str, str, int | None]]] = defaultdict(set)
        self._request_keys: dict[Any, bytes] = {}  # by the engine's hashes, of all pods
        self._kinds: dict[tuple[str, int], str | None] = {}
        self._announced: Counter[Any] = Counter()

    def apply(self, pod: str, events: Iterable[Event]) -> None:
        """Apply the events of a pod in order."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                for holders in self._holders.values():
                    holders -= {holder for holder in holders if holder[0] == pod}
                continue
            holder = (pod, (event.get("medium") or "gpu").lower(), event.get("group_idx"))
            if event["type"] == "BlockStored":
                self._store(holder, event)
            else:
                self._remove(holder, event["block_hashes"])

    def _store(self, holder: tuple[str, str, int | None], event: Event) -> None:
        pod, _, group = holder
        if group is not None:
            kind = event.get("kv_cache_spec_kind") or self._kinds.get((pod, group))
            self._kinds[pod, group] = kind
            if kind not in MAIN_KINDS:
                return
        parent, hashes, tokens = b"", event["block_hashes"], event["token_ids"]
        if event.get("parent_block_hash") is not None:
            if event["parent_block_hash"] not in self._request_keys:
                return
            parent = self._request_keys[event["parent_block_hash"]]
        if tokens:
            if len(tokens) != self.block_tokens * len(hashes):
                return
            features = event.get("extra_keys") or [None] * len(hashes)
            keys = self.keys_of(tokens, features, parent)
            self._request_keys |= dict(zip(hashes, keys, strict=True))
        else:  # only another place of blocks that are known already
            keys = [self._request_keys[some] for some in hashes if some in self._request_keys]
        for key in keys:
            self._holders[key].add(holder)
        if keys:
            self._announced.update((holder, some) for some in hashes)

    def _remove(self, holder: tuple[str, str, int | None], hashes: Sequence[Any]) -> None:
        pod, _, group = holder
        if group is not None and self._kinds.get((pod, group)) not in MAIN_KINDS:
            return
        for some in hashes:
            self._announced[holder, some] -= 1
            if self._announced[holder, some] <= 0 and some in self._request_keys:
                holders = self._holders[self._request_keys[some]]
                holders.discard(holder)
                if not holders:  # its tokens are forgotten, until an engine tells them again
                    del self._request_keys[some]

    def held_by(self, pod: str) -> set[Any]:
        """Return the engine's hashes of the blocks that a pod has."""
        return {
            some
            for some, key in self._request_keys.items()
            if any(holder[0] == pod for holder in self._holders[key])
        }

    def keys_of(
        self, tokens: Sequence[int], extra_keys: Sequence[Any] = (), parent: bytes = b""
    ) -> list[bytes]:
        """Return the router's keys of a prompt; of extra keys it takes text, and [text, offset]."""
        keys = []
        for block in range(len(tokens) // self.block_tokens):
            some = list(tokens[block * self.block_tokens : (block + 1) * self.block_tokens])
            extra = (extra_keys[block] if block < len(extra_keys) else None) or ()
            names = [key if isinstance(key, str) else key[0] for key in extra]
            parent = hashlib.sha256(parent + repr((some, names)).encode()).digest()
            keys.append(parent)
        return keys

    def scores(self, tokens: Sequence[int], pods: Sequence[str]) -> dict[str, float]:
        """Return for each pod the sum of its leading blocks' weights; pods without any left out."""
        scores: dict[str, float] = {}
        active = set(pods)
        for key in self.keys_of(tokens):
            weights: dict[str, float] = {}
            for pod, tier, _ in self._holders[key]:
                for one in pods if pod.startswith("pool:") else (pod,):
                    weight = LLMD_WEIGHTS.get(tier, LLMD_WEIGHT_UNKNOWN)
                    weights[one] = max(weight, weights.get(one, 0.0))
            active &= weights.keys()
            for pod in active:
                scores[pod] = scores.get(pod, 0.0) + weights[pod]
        return scores


class DynamoIndex:
    """Dynamo's index of one worker: the engine's hashes by tier.

    What it does to lower tiers when an engine clears its cache is left out.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tiers: dict[str, set[Any]] = defaultdict(set)
        self.dropped = 0
        self._kinds: dict[int | None, str | None] = {}  # by group; removals do not tell it

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in order."""
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.tiers["device"].clear()
                continue
            tier = DYNAMO_TIERS.get(event.get("medium"))
            local = event.get("locality") in (None, "LOCAL") and event.get("ownership") is None
            if tier is None or not local:
                self.dropped += 1
                continue
            group = event.get("group_idx")
            kind = event.get("kv_cache_spec_kind") or self._kinds.get(group)
            self._kinds[group] = kind
            if kind is not None and kind not in MAIN_KINDS:
                continue
            if event["type"] == "BlockRemoved":
                self.tiers[tier] -= set(event["block_hashes"])
            elif event["block_size"] == self.block_tokens:
                whole = len(event["token_ids"]) // self.block_tokens
                self.tiers[tier].update(event["block_hashes"][:whole])


class DynamoSharedIndex:
    """Dynamo's index of a shared store for SGLang: objects that are present, by their names."""

    def __init__(self, entries_max: int = 1_000_000) -> None:
        self.present: set[str] = set()
        self.gaps = 0
        self._groups: dict[str, bool] = {}  # whether all objects of the block were looked up
        self._sequence: int | None = None
        self._entries_max = entries_max

    def connect(self) -> None:
        """Forget all, as at each connection."""
        self.present.clear()
        self._groups.clear()
        self._sequence = None

    def apply(self, sequence: int, events: Iterable[Event]) -> None:
        """Apply a batch; a missing number clears."""
        before, self._sequence = self._sequence, sequence
        if before == sequence:
            return
        if before is not None and sequence != before + 1:
            self.gaps += 1
            self.present.clear()
            self._groups.clear()
        for event in events:
            key, group = event.get("object_key"), event.get("group_id")
            if event.get("tenant_id") not in ("", None, "default") or key is None:
                continue
            if event["event_type"] == "stored":
                self.present.add(key)
                if group:
                    self._groups[group] = False
            elif event["event_type"] == "removed":
                self.present.discard(key)
                if group:
                    self._groups.pop(group, None)
                else:
                    self._groups.clear()
        if len(self.present) + len(self._groups) > self._entries_max:
            self.connect()

    @property
    def groups_found(self) -> set[str]:
        """Return the names of blocks whose objects are not looked for again."""
        return {group for group, found in self._groups.items() if found}

    def hits(
        self, hashes: Iterable[bytes], suffixes: Sequence[str], prefix: str = ""
    ) -> list[bool]:
        """Return which blocks are there; `suffixes`, `prefix`: of the objects of a block."""
        found = []
        for key in hashes:
            name = f"{prefix}{key.hex()}"
            group = f"sglang-hicache:{name}"
            hit = self._groups.get(group, False) or all(
                f"{name}{suffix}" in self.present for suffix in suffixes
            )
            if hit and group in self._groups:
                self._groups[group] = True
            found.append(hit)
        return found
