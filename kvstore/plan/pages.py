"""What a page of a trace is: how many tokens, how many bytes. Said by the user, by the trace, or found out.

A trace whose requests have `input_length` tokens in n pages says how many tokens a page has: either the last page may
be part of one (Mooncake's traces), or only full pages have ids (engines):

    (n - 1) * t <  input_length <=  n * t            n * t <= input_length < (n + 1) * t
"""

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.measure.trace import TraceRequest

LOOKED_AT = 2000  # requests
LEAST, MOST = 1e-9, 1e15  # of what is said: sums and products of such stay finite
PAGE_NBYTES_MAX = 1 << 40
TOKEN_NBYTES = 128 << 10  # of a model of 32 layers with 8 KV heads of 128, two bytes each (Llama 3 8B)
_DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class PageSize:
    """`assumed`: what was neither said nor found, in words."""

    tokens: float
    nbytes: int
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_positive("--tokens-per-page", self.tokens)
        if not 1 <= self.nbytes <= PAGE_NBYTES_MAX:
            raise InvalidRequest(f"--page-bytes {self.nbytes} must be in 1..{PAGE_NBYTES_MAX}")


def check_positive(option: str, value: float) -> None:
    """Raises InvalidRequest, which names the option."""
    if not LEAST <= value <= MOST:
        raise InvalidRequest(f"{option} {value:g} must be above 0: in {LEAST:g}..{MOST:g}")


def page_size(
    requests: Iterable[TraceRequest], tokens: float | None, nbytes: int | None, token_nbytes: int | None
) -> PageSize:
    """Of the pages of a trace. What is None is found out from its first requests, or assumed. Raises InvalidRequest."""
    some = [request for request in itertools.islice(requests, LOOKED_AT) if request.hash_ids]
    assumed = []
    if tokens is None:
        tokens = _said([(request.page_tokens, len(request.hash_ids)) for request in some]) or _tokens(some)
    if tokens is None:
        raise InvalidRequest("the trace does not tell how many tokens a page has; say --tokens-per-page")
    if nbytes is None and token_nbytes is None:
        said = {request.page_nbytes for request in some} - {0}
        if said:
            nbytes = round(_said([(request.page_nbytes, len(request.hash_ids)) for request in some]))
        if len(said) > 1:
            assumed.append(f"the trace has pages of {len(said)} sizes; all are taken for pages of their mean")
        elif not said:
            token_nbytes = TOKEN_NBYTES
            assumed.append(
                f"a token takes {TOKEN_NBYTES >> 10} KiB, as in Llama 3 8B at 16 bits; else say --model-config "
                "or --page-bytes"
            )
    check_positive("--tokens-per-page", tokens)
    if nbytes is None:
        nbytes = math.ceil(tokens * (token_nbytes or 0))
    return PageSize(tokens, nbytes, tuple(assumed))


def _said(found: list[tuple[float, int]]) -> float:
    """The mean of what requests of so many pages say; 0: they do not."""
    told = [(value, pages) for value, pages in found if value]
    return sum(value * pages for value, pages in told) / sum(pages for _, pages in told) if told else 0.0


def _tokens(requests: list[TraceRequest]) -> float | None:
    """As the lengths have it."""
    told = [(request.input_length, len(request.hash_ids)) for request in requests if request.input_length]
    if not told:
        return None
    most = min((tokens / (pages - 1) for tokens, pages in told if pages > 1), default=math.inf)
    least = math.ceil(max(tokens / pages for tokens, pages in told))
    if least < most:
        return float(least)
    full = math.floor(min(tokens / pages for tokens, pages in told))
    if full > max(tokens / (pages + 1) for tokens, pages in told):
        return float(full)
    return sum(tokens for tokens, _ in told) / sum(pages for _, pages in told)


# ---- models ----------------------------------------------------------------------------------


def token_nbytes(config: Path) -> int:
    """KV bytes of a token, of all ranks together, by a model's config.json. Raises InvalidRequest."""
    try:
        found = json.loads(config.read_bytes())
        nbytes = _token_nbytes(found.get("text_config", found))
        if not 1 <= nbytes <= PAGE_NBYTES_MAX:
            raise ValueError(f"a token would take {nbytes} bytes")
        return nbytes
    except OSError as error:
        raise InvalidRequest(f"can not read {config}: {error.strerror}") from error
    except (ValueError, AttributeError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(
            f"{config} describes no model that is known here ({type(error).__name__}: {error}); say --page-bytes"
        ) from error


def _token_nbytes(model: dict[str, Any]) -> int:
    kinds = set(model.get("layer_types") or ("full_attention",))
    if kinds != {"full_attention"}:
        raise ValueError(f"it has layers of {', '.join(sorted(kinds))}, whose pages are not all alike")
    dtype = model.get("dtype") or model.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_NBYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    layers = int(model["num_hidden_layers"])
    if model.get("kv_lora_rank"):  # MLA: one latent for all heads
        return layers * (int(model["kv_lora_rank"]) + int(model["qk_rope_head_dim"])) * _DTYPE_NBYTES[dtype]
    heads = int(model["num_attention_heads"])
    head_dim = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    return 2 * layers * int(model.get("num_key_value_heads") or heads) * head_dim * _DTYPE_NBYTES[dtype]
