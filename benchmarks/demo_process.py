"""Run one of the two processes of `make demo`: a model and one side of the store.

python benchmarks/demo_process.py save|answer --address HOST:PORT ...      prints one JSON object
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from gpu_agent import SaveResult
from gpu_agent.engines.transformers import TransformersAdapter, cache_argument
from kvstore import Client, KVStoreError, client_config, prefix_hashes

QUESTION = "\n\nQuestion: May I redistribute a modified version of this work?\nAnswer:"
GENERATED_TOKENS = 16
# The demo's node has 1 GiB; a model with a larger document gets fewer tokens.
DOCUMENT_NBYTES_MAX = 768 << 20
# Random weights with a fixed seed; token ids are the bytes of the text. The prefill of every size
# takes long enough to be worth a load: seconds on two CPU cores, a third of a second on a large
# GPU.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "cpu": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "gpu": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
    },
}
KV_HEADS = {"tiny": 4, "cpu": 4, "gpu": 2}
GPU_NBYTES_MIN = 20 << 30  # "gpu" has 8.2 GB of float32 weights, and prefill needs room beside them
Result = TypeVar("Result")


class Subject:
    """The model, its tokens and the adapter, made alike by both processes."""

    def __init__(self, args: argparse.Namespace, client: Client) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        text = Path(args.text).read_bytes().decode("utf-8", "replace")
        if args.model:
            self.name = Path(args.model).resolve().name
            self.model, document, question = _pretrained(args.model, text)
        else:
            size = args.size if args.size != "auto" else _size_for(self.device)
            self.name = f"random-llama-{size}"
            with self.device:  # the seed gives other numbers on another kind of device
                self.model, document, question = _random(size, text)
        self.model = self.model.to(self.device).eval()
        self.adapter = TransformersAdapter(
            client, self.model, self.name, page_tokens=args.page_tokens
        )
        layout = self.adapter.namespace.layout
        pages = min(args.tokens, len(document), self._positions() - 256) // args.page_tokens
        self.pages = min(pages, DOCUMENT_NBYTES_MAX // layout.page_nbytes)
        if self.pages < 1:
            raise SystemExit(
                f"{args.text} gives {len(document)} tokens, less than a page of {args.page_tokens}"
            )
        self.document = document[: self.pages * args.page_tokens]
        self.prompt = self.document + question

    def _positions(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).max_position_embeddings)

    @torch.inference_mode()
    def forward(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        """Return logits `[len(ids), vocabulary]`, and extend the cache."""
        logits: torch.Tensor = self.model(
            torch.tensor([ids], device=self.device), **{cache_argument(self.model): cache}
        ).logits[0]
        return logits

    def generate(self, logits: torch.Tensor, cache: DynamicCache) -> list[int]:
        """Continue greedily after the last logits."""
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < GENERATED_TOKENS:
            tokens.append(int(self.forward(tokens[-1:], cache)[-1].argmax()))
        return tokens

    def timed(self, call: Callable[[], Result]) -> tuple[Result, float]:
        """Return (result, milliseconds), including the GPU's work."""
        self._wait()
        start = time.perf_counter()
        result = call()
        self._wait()
        return result, 1000 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _size_for(device: torch.device) -> str:
    large = (
        device.type == "cuda"
        and torch.cuda.get_device_properties(device).total_memory >= GPU_NBYTES_MIN
    )
    return "gpu" if large else "cpu"


def _random(size: str, text: str) -> tuple[Any, list[int], list[int]]:
    torch.manual_seed(0)
    heads = KV_HEADS[size]
    config = LlamaConfig(
        vocab_size=256, num_key_value_heads=heads, max_position_embeddings=16384, **SIZES[size]
    )
    return LlamaForCausalLM(config), list(text.encode()), list(QUESTION.encode())


def _pretrained(path: str, text: str) -> tuple[Any, list[int], list[int]]:
    if not Path(path).is_dir():
        raise SystemExit(
            f"{path} is not a directory; MODEL is the path of a model saved by transformers"
        )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto")
    return (
        model,
        tokenizer(text)["input_ids"],
        tokenizer(QUESTION, add_special_tokens=False)["input_ids"],
    )


def kv_digest(cache: DynamicCache, count: int) -> str:
    """Digest the K and V of the first `count` tokens."""
    running = hashlib.sha256()
    for layer in cache.layers if count else ():
        for tensor in (layer.keys, layer.values):
            running.update(tensor[:, :, :count].contiguous().view(torch.uint8).cpu().numpy().data)
    return running.hexdigest()[:16]


def save_document(subject: Subject, client: Client) -> dict[str, Any]:
    """Process 1: prefills the document and stores its KV."""
    cache = DynamicCache()
    _, prefill_ms = subject.timed(lambda: subject.forward(subject.document, cache))

    def save() -> SaveResult:
        return subject.adapter.save(cache, subject.document).done.result()

    saved, save_ms = subject.timed(save)
    if saved.dropped:
        raise SystemExit(f"{saved.dropped} pages were not stored: {saved.reason}")
    digest = kv_digest(cache, len(subject.document))
    return {
        "document_prefill_ms": prefill_ms,
        "save_ms": save_ms,
        "pages_stored": saved.stored,
        "kv_saved": digest,
    }


def answer_question(subject: Subject, client: Client) -> dict[str, Any]:
    """Process 2: with the store first, while everything else is cold."""
    client.open(subject.adapter.namespace)  # connects, as an engine does at its start
    subject.forward(subject.prompt[:128], DynamicCache())  # warms the model up
    found, lookup_ms = subject.timed(lambda: subject.adapter.lookup(subject.prompt))
    (cache, count), load_ms = subject.timed(lambda: subject.adapter.load(subject.prompt))
    loaded = kv_digest(cache, count)
    rest = subject.prompt[count:]
    logits, rest_ms = subject.timed(lambda: subject.forward(rest, cache))
    tokens = subject.generate(logits, cache)

    whole, whole_ms = subject.timed(lambda: subject.forward(subject.prompt, DynamicCache()))
    split_cache = DynamicCache()
    subject.forward(subject.document, split_cache)
    split = subject.forward(subject.prompt[len(subject.document) :], split_cache)
    same_shape = logits.shape == split.shape
    layout = subject.adapter.namespace.layout
    text = subject.model.config.get_text_config(decoder=True)
    with_ms = lookup_ms + load_ms + rest_ms
    return {
        "model": subject.name,
        "layers": text.num_hidden_layers,
        "dtype": layout.slices[0].plane.dtype,
        "device": str(subject.device),
        "document_tokens": len(subject.document),
        "question_tokens": len(subject.prompt) - len(subject.document),
        "tokens_found": found,
        "tokens_loaded": count,
        "pages": count // layout.page_tokens,
        "kv_loaded": loaded,
        "kv_computed": kv_digest(split_cache, count),
        "mib": count // layout.page_tokens * layout.page_nbytes / 2**20,
        "wire": client.wire_name,
        "lookup_ms": lookup_ms,
        "load_ms": load_ms,
        "prefill_with_ms": rest_ms,
        "prefill_without_ms": whole_ms,
        "speed_up": whole_ms / with_ms,
        "logits_equal": same_shape and torch.equal(logits, split),
        "tokens_equal": tokens == subject.generate(split, split_cache),
        "one_shot_difference_max": float((whole[-1].float() - logits[-1].float()).abs().max()),
        "one_shot_argmax_equal": int(whole[-1].argmax()) == int(logits[-1].argmax()),
        "namespace": subject.adapter.namespace.digest.hex(),
        "first_key": prefix_hashes(subject.document, layout.page_tokens)[0].hex(),
        "generated_tokens": GENERATED_TOKENS,
        "document": subject.document,
    }


ROLES = {"save": save_document, "answer": answer_question}


def main(argv: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--address", required=True, help="the node")
    parser.add_argument("--text", required=True, help="file of the document")
    parser.add_argument("--model", help="directory of a model; default: random weights")
    parser.add_argument(
        "--size", choices=("auto", *SIZES), default="auto", help="size of the random model"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the document at most")
    parser.add_argument("--page-tokens", type=int, default=64, help="tokens per page")
    args = parser.parse_args(argv)
    try:
        with Client(client_config(address=args.address)) as client:
            subject = Subject(args, client)
            with subject.adapter:
                print(json.dumps(ROLES[args.role](subject, client)))
    except KVStoreError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
