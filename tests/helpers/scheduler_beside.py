"""Our connector in vLLM's `MultiConnector`, next to fake connectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from gpu_agent.engines.vllm import KVStoreConnector
from gpu_agent.engines.vllm_metadata import Orders


def ours_of(connector: Any) -> Any:
    """Return our connector, alone or in a `MultiConnector`."""
    inner = getattr(connector, "sub_connectors", [connector])
    return next(one for one in inner if isinstance(one, KVStoreConnector))


def orders_of(metadata: Any) -> Any:
    inner = getattr(metadata, "metadata", [metadata])
    return next(one for one in inner if isinstance(one, Orders)).orders


def transfer_config(
    store: dict[str, Any], policy: str, beside: Any, role: str = "kv_both", outer: str = "kv_both"
) -> KVTransferConfig:
    """Return vLLM's transfer configuration with our connector.

    `beside`: other connectors before and after ours in a `MultiConnector` of role `outer`, or None
    for ours alone.
    """
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "gpu_agent.engines.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": store,
    }
    if beside is None:
        return KVTransferConfig(**ours)
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=outer,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [*beside[0], ours, *beside[1]]},
    )


def played(name: str) -> dict[str, Any]:
    """Return the configuration of a connector of this file."""
    return {"kv_connector": name, "kv_connector_module_path": __name__, "kv_role": "kv_both"}


@dataclass
class Payload(KVConnectorHandshakeMetadata):
    agent: str


class Silent(KVConnectorBase_V1, SupportsHMA):
    """A connector that does nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class WithHandshake(Silent):
    """A connector like NIXL: with handshake metadata, strict types and a required KV layout."""

    heard: ClassVar[list[Any]] = []

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "LBHNC"

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Payload("nobody")

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        for payload in metadata.values():
            if not isinstance(payload, Payload):
                raise ValueError("expects Payload for handshake metadata")
        self.heard.append(dict(metadata))


class FailsToLoad(Silent):
    """A connector that promises the first tokens of each prompt once, and fails to load them."""

    TOKENS = 32
    tables: ClassVar[list[list[int]]] = []  # block tables being loaded

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._promised: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if num_computed_tokens or request.request_id in self._promised:
            return 0, False
        return self.TOKENS, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            self.tables.append(blocks.get_block_ids()[0][: self.TOKENS // 16])

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = {block for table in self.tables for block in table}
        self.tables.clear()
        return failed


class LoadsForever(Silent):
    """A connector that promises the first tokens of each prompt, and loads them asynchronously."""

    TOKENS = 48
    aborted: ClassVar[set[str]] = set()  # requests whose loads end in the next step

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return (0, False) if num_computed_tokens else (self.TOKENS, True)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, found = set(self.aborted), KVConnectorTransferResults()
        self.aborted.clear()
        found.finished_recving = ended
        return found
