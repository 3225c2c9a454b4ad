"""Save and load the KV cache of a Hugging Face transformers model.

    adapter.save(cache, tokens)            after a forward pass
    cache, n = adapter.load(tokens)        then model(ids[:, n:], cache=cache)

`cache=` is called `past_key_values=` before transformers 5.24; `cache_argument(model)` says which.

Each cache is a pool of its own: token slot t of layer l is `cache.layers[l].keys[0, :, t, :]`, so
the pool's tensors are transposed views of the cache's, without a copy. transformers is imported
only here.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gpu_agent.agent import Agent
from gpu_agent.identity.transformers import KV_GROUP, check_adapters, model_namespace
from gpu_agent.kernels.available import transfer_for
from gpu_agent.load_pipeline import SaveJob
from gpu_agent.options import AgentConfig, keep_local
from gpu_agent.pool import KVPool
from kvstore.client import Client
from kvstore.errors import InvalidRequest
from kvstore.keys import Namespace, prefix_hashes
from kvstore.security.secrets import DEFAULT_TENANT
from kvstore.tracing import request

PAGE_TOKENS = 64


class TransformersAdapter:
    """Save and load the KV of one causal language model, batch size 1, without padding.

    `name` names the model to all clients of the store, so it is never a local path. `revision`
    names its weights; without one, all parameters are digested, so that other weights under the
    same name cannot hit. The tenant is the client's. transformers has no request names: wrap calls
    in `kvstore.tracing.request(name)`.

    Raises ConfigError for an unreadable token. Raises InvalidRequest for a model with layers other
    than full or sliding-window attention, or whose KV depends on more than its tokens, and in every
    call after adapters (LoRA) were added.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        name: str,
        revision: str | None = None,
        page_tokens: int = PAGE_TOKENS,
        config: AgentConfig | None = None,
    ) -> None:
        self.namespace = namespace_of(
            model, name, revision, page_tokens, client.key_id, client.tenant
        )
        self._model: Any = model
        keep_local(client.config)
        self._agent = Agent(client, self.namespace, None, config, transfer_for(model.device))

    def save(self, cache: DynamicCache, tokens: Sequence[int] | torch.Tensor) -> SaveJob:
        """Store the full pages of `tokens`, the ids whose KV is at the start of `cache`.

        The cache may be used and extended at once: transformers never changes its tensors in place.
        Raises InvalidRequest if the cache does not hold the plain KV of these tokens.
        """
        check_adapters(self._model)
        ids = _token_list(tokens)
        pairs = _plain_pairs(cache, self._model)
        held = min((keys.shape[-2] for keys, _ in pairs), default=0)
        if held < len(ids):
            raise InvalidRequest(
                f"the cache holds {held} tokens, fewer than the {len(ids)} to save"
            )
        hashes = prefix_hashes(ids, self.namespace.layout.page_tokens)
        units = torch.arange(len(hashes) * self.namespace.layout.page_tokens)
        with request():
            return self._agent.save(hashes, units, self._pool(pairs))

    def lookup(self, tokens: Sequence[int] | torch.Tensor) -> int:
        """Return how many leading tokens have stored KV; 0 if the store does not answer."""
        check_adapters(self._model)
        page_tokens = self.namespace.layout.page_tokens
        with request():
            return self._agent.lookup(prefix_hashes(_token_list(tokens), page_tokens)) * page_tokens

    def load(self, tokens: Sequence[int] | torch.Tensor) -> tuple[DynamicCache, int]:
        """Return (fresh cache, number of leading `tokens` in it); an empty cache and 0 for a miss.

        At most all tokens but the last: a model needs one to compute the next.
        """
        check_adapters(self._model)
        ids = _token_list(tokens)
        page_tokens = self.namespace.layout.page_tokens
        hashes = prefix_hashes(ids, page_tokens)
        cache = DynamicCache()
        with request():
            hashes = hashes[: self._agent.lookup(hashes)]
            if not hashes:
                return cache, 0
            pairs = self._empty_pairs(len(hashes) * page_tokens)
            units = torch.arange(len(hashes) * page_tokens)
            loaded = self._agent.load(hashes, units, pool=self._pool(pairs)).done.result()
        count = min(loaded.pages * page_tokens, len(ids) - 1)
        for number, (keys, values) in enumerate(pairs if count else ()):
            # `update` copies; without tokens it only sets the layer up, which then takes our
            # tensors.
            cache.update(keys[:, :, :0], values[:, :, :0], number)
            layer: Any = cache.layers[number]
            layer.keys, layer.values = keys[:, :, :count], values[:, :, :count]
        return cache, count

    def close(self) -> None:
        """End pending saves in bounded time; the client stays open."""
        self._agent.close()

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self._agent.check()

    def __enter__(self) -> "TransformersAdapter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _empty_pairs(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return empty K and V `[1, heads, count, dim]` of every layer, in the cache's order."""
        group = self.namespace.layout.groups[0]
        heads, dim = group.planes[0].unit_shape
        dtype = getattr(torch, group.planes[0].dtype)

        def empty() -> torch.Tensor:
            return torch.empty((1, heads, count, dim), dtype=dtype, device=self._model.device)

        return [(empty(), empty()) for _ in group.layers]

    def _pool(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> KVPool:
        tensors = {}
        for layer, (keys, values) in enumerate(pairs):
            if keys.shape[0] != 1:
                raise InvalidRequest(
                    f"the cache holds a batch of {keys.shape[0]} prompts; save them one by one"
                )
            tensors[KV_GROUP, layer, "k"] = keys[0].transpose(0, 1)
            tensors[KV_GROUP, layer, "v"] = values[0].transpose(0, 1)
        return KVPool(self.namespace.layout, tensors)


def namespace_of(
    model: Any,
    name: str,
    revision: str | None,
    page_tokens: int = PAGE_TOKENS,
    key_id: str = "",
    tenant: str = DEFAULT_TENANT,
) -> Namespace:
    """Return the namespace of a model's KV.

    Raises InvalidRequest if it can not be stored.
    """
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise InvalidRequest(
                f"layer {number} of {type(model).__name__} caches with {type(layer).__name__}; "
                "only the keys and values of full or sliding attention can be stored"
            )
    return model_namespace(model, name, revision, page_tokens, key_id, tenant)


def cache_argument(model: Any) -> str:
    """Return the name of a model's cache argument.

    It is `cache` since transformers 5.24, which warns about the older name `past_key_values`.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _plain_pairs(cache: DynamicCache, model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (K, V) of every layer.

    Raises InvalidRequest for a cache that keeps fewer than all tokens, as a sliding window does, or
    anything but plain K and V.
    """
    pairs = []
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise InvalidRequest(
                f"layer {number} of the cache is a {type(layer).__name__}, which may not hold the "
                "plain KV of every token; run the model with "
                f"{cache_argument(model)}=DynamicCache()"
            )
        if layer.keys is None or layer.values is None:
            raise InvalidRequest(f"layer {number} of the cache is empty; save after a forward pass")
        pairs.append((layer.keys, layer.values))
    return pairs


def _token_list(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    if not isinstance(tokens, torch.Tensor):
        return list(tokens)
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1:
        raise InvalidRequest(
            f"tokens have shape {list(tokens.shape)}; one prompt has [tokens] or [1, tokens]"
        )
    ids: list[int] = tokens.tolist()
    return ids
