"""A connector that keeps blocks as files, and can be told to lie.

It is the suite's own proof. Without a lie each case must be right, with hits. With any lie of
lies.py some case must be wrong. `kv_connector_extra_config` has "folder"; the lie is the text of
the file `lie` in it and is read for each request, so one engine can tell them all. Not for
production: all copies are synchronous.

A request waits for its load in a step before its own. In the step itself it would be too late for
recurrent states: vLLM copies them to where the step needs them before it calls the connector.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cache_blocks import rows_of
from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class Transfer(base.KVConnectorMetadata):
    """What workers load and save in a step: (file, group, block) each.

    `late`: loads of requests that are computed in this step, to be made after it.
    """

    lie: str = ""
    loads: list[tuple[str, int, int]] = field(default_factory=list)
    saves: list[tuple[str, int, int]] = field(default_factory=list)
    late: list[tuple[str, int, int]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


class FolderConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["folder"])
        self._groups = [_Group(group) for group in kv_cache_config.kv_cache_groups]
        self._unit = max(group.size for group in self._groups)
        self._hash_size = min(group.size for group in self._groups)
        self._total = kv_cache_config.num_blocks
        self._rank = vllm_config.parallel_config.rank
        self._manager: Any = None
        self._lie = ""
        # Scheduler: requests by name, the tokens that each already had, and pages saved so far.
        self._requests: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._saved: dict[str, list[int]] = {}
        self._late: dict[str, list[tuple[str, int, int]]] = {}  # what a lie puts off
        self._waiting: dict[str, int] = {}  # for so many more steps
        self._next = Transfer()
        # Worker: layers.
        self._caches: dict[str, list[torch.Tensor]] = {}

    # ---- scheduler -------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._read_lie()
        self._local[request.request_id] = num_computed_tokens
        most = (request.num_tokens - 1) // self._unit
        for count in range(most, num_computed_tokens // self._unit, -1):
            stored = count - (self._lie == "off by one" and count > 1)
            if self._complete(request, stored * self._unit):
                return count * self._unit - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        self._requests[name] = request
        if not num_external_tokens:
            return
        local = self._local[name]
        total = local + num_external_tokens
        tables = blocks.get_block_ids()
        late = self._lie in ("loaded too late", "late after abort")
        loads = self._late.setdefault(name, []) if late else self._next.loads
        for number, group in enumerate(self._groups):
            for index in group.needed(total):
                block = tables[number][index] if index < len(tables[number]) else 0
                if block and (group.is_state or index * group.size >= local):
                    source = index - (index > 0 and self._gives_wrong_blocks(request))
                    if group.is_state:
                        source -= self._lie == "swapped states" and index > 0
                    loads.append((self._file(request, number, source), number, block))
        if self._lie == "late after abort":
            self._waiting[name] = 3
        else:
            self._next.done.append(name)

    def _gives_wrong_blocks(self, request: Any) -> bool:
        preempted = self._lie == "wrong if preempted" and request.num_preemptions
        return bool(self._lie == "wrong block" or preempted)

    def build_connector_meta(self, scheduler_output: Any) -> Transfer:
        found, self._next = self._next, Transfer()
        found.lie = self._lie
        self._end_waiting(found)
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            if name in self._requests:
                found.late += self._late.pop(name, [])
                found.saves += self._full_blocks(name, tokens, scheduler_output)
        for name in scheduler_output.finished_req_ids:
            self._requests.pop(name, None)
            self._saved.pop(name, None)
            self._local.pop(name, None)
            if name not in self._waiting:
                self._late.pop(name, None)
        return found

    def _end_waiting(self, found: Transfer) -> None:
        """Make the loads that took some steps; those of aborted requests behind the step."""
        for name in list(self._waiting):
            self._waiting[name] -= 1
            if self._waiting[name]:
                continue
            del self._waiting[name]
            loads = self._late.pop(name, [])
            if name in self._requests:
                found.loads += loads
                found.done.append(name)
            else:
                found.late += loads

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if request.request_id in self._waiting:
            self._waiting[request.request_id] = 2
            self._next.done.append(request.request_id)
        return False, None

    def _full_blocks(self, name: str, tokens: int, output: Any) -> list[tuple[str, int, int]]:
        """Return the blocks that this step fills, and states at the boundaries it keeps."""
        request = self._requests[name]
        after = min(
            request.num_computed_tokens + tokens, len(request.block_hashes) * self._hash_size
        )
        tables = self._tables(name, output)
        done = self._saved.setdefault(name, [0] * len(self._groups))
        found = []
        for number, group in enumerate(self._groups):
            full = after // group.size
            if not group.is_state or self._lie == "state of null":
                found += [
                    (self._file(request, number, index), number, tables[number][index])
                    for index in range(done[number], min(full, len(tables[number])))
                    if tables[number][index] or self._lie == "state of null"
                ]
            done[number] = max(done[number], full)
        state = getattr(output, "kv_connector_block_state", None)
        offers = getattr(state, "boundary_state_offloads", None) or {}
        for number, block, boundary in offers.get(name, ()):
            index, rest = divmod(boundary, self._groups[number].size)
            if not rest:
                found.append((self._file(request, number, index - 1), number, block))
        return found

    def _tables(self, name: str, output: Any) -> Sequence[Sequence[int]]:
        state = getattr(output, "kv_connector_block_state", None)
        if state is not None and (tables := state.get_block_ids(name)) is not None:
            found: Sequence[Sequence[int]] = tables
            return found
        return list(self._manager.get_block_ids(name))

    def _complete(self, request: Any, tokens: int) -> bool:
        return tokens > 0 and all(
            self._exists(self._file(request, number, index))
            for number, group in enumerate(self._groups)
            for index in group.needed(tokens)
        )

    def _exists(self, name: str) -> bool:
        return (self._pages() / f"{name}-0").exists()

    def _file(self, request: Any, number: int, index: int) -> str:
        size = self._groups[number].size
        tokens = list(request.all_token_ids)[: (index + 1) * size]
        if self._lie == "no chain":
            tokens = tokens[index * size :]
        if self._lie == "older prompt":
            name = hashlib.sha256(f"{index} {request.num_prompt_tokens}".encode()).hexdigest()
        elif self._lie in ("no chain", "adapter ignored", "media ignored"):
            name = hashlib.sha256(str(tokens).encode()).hexdigest()
        else:
            chain = request.block_hashes[(index + 1) * size // self._hash_size - 1]
            name = hashlib.sha256(bytes(chain)).hexdigest()
        return f"{number}-{name[:32]}"

    def _read_lie(self) -> None:
        path = self._folder / "lie"
        self._lie = path.read_text().strip() if path.exists() else ""

    # ---- worker ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for name, cache in kv_caches.items():
            self._caches[name] = list(cache) if isinstance(cache, list | tuple) else [cache]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take a step's orders, before its forward pass; `start_load_kv` may come behind it."""
        super().bind_connector_metadata(connector_metadata)
        transfer = self._transfer()
        if transfer.lie == "saved too early":
            self._save_all(transfer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfer = self._transfer()
        if transfer.lie == "last block missing":
            ends = {number: block for _, number, block in transfer.loads}
            self._load_all(transfer, [load for load in transfer.loads if load[2] != ends[load[1]]])
        elif transfer.lie != "nothing loaded":
            self._load_all(transfer, transfer.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        transfer = self._transfer()
        self._load_all(transfer, transfer.late)
        if transfer.lie != "saved too early":
            self._save_all(transfer)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        return None, set(self._transfer().done) or None

    def _transfer(self) -> Transfer:
        found: Any = self._get_connector_metadata()
        assert isinstance(found, Transfer)
        self._lie = found.lie
        return found

    def _load_all(self, transfer: Transfer, loads: Sequence[tuple[str, int, int]]) -> None:
        for name, number, block in loads:
            path = self._pages() / f"{name}-{self._rank}"
            if not path.exists():
                continue
            page = torch.load(path, weights_only=True)
            layers = self._groups[number].layers
            for place, layer in enumerate(layers):
                if transfer.lie == "one layer missing" and (name, place) == (loads[0][0], 1):
                    continue
                source = (place + (transfer.lie == "swapped layers")) % len(layers)
                for tensor, rows in zip(self._caches[layer], page[source], strict=True):
                    tensor[rows_of(tensor, [block], self._total)] = rows.to(tensor.device)

    def _save_all(self, transfer: Transfer) -> None:
        for name, number, block in transfer.saves:
            path = self._pages() / f"{name}-{self._rank}"
            if transfer.lie == "older prompt" and path.exists():
                continue
            page = [
                [
                    tensor[rows_of(tensor, [block], self._total)].cpu()
                    for tensor in self._caches[layer]
                ]
                for layer in self._groups[number].layers
            ]
            path.parent.mkdir(exist_ok=True)
            torch.save(page, path.with_suffix(f".{os.getpid()}"))
            os.replace(path.with_suffix(f".{os.getpid()}"), path)

    def _pages(self) -> Path:
        return self._folder / (self._lie.replace(" ", "-") or "honest")


class _Group:
    """A group of layers with one block table."""

    def __init__(self, group: Any) -> None:
        spec = group.kv_cache_spec
        self.size: int = spec.block_size
        self.layers: list[str] = list(group.layer_names)
        self.is_state = "Mamba" in type(spec).__name__
        self._window: int | None = getattr(spec, "sliding_window", None)

    def needed(self, tokens: int) -> range:
        """Return the indices of the blocks that a prefix of `tokens` needs."""
        last = tokens // self.size
        if self.is_state:
            return range(last - 1, last)
        if self._window:
            return range(max(0, tokens - self._window + 1) // self.size, last)
        return range(last)
