"""Measure time to first token on a GPU: cold prefill against loading the prompt's KV.

A real transformers model of Llama architecture with 1.2 B random parameters (the shape of Llama 3.2
1B), bfloat16. A prompt of 8k and of 32k tokens; an earlier request had all but the last 64.

    cold       one forward pass over the prompt
    stored     lookup, load, then a forward pass over the last tokens
    PCIe       payload over the speed of one big page-locked copy in the same run, as a share of the
               load

    python benchmarks/ttft.py                 on a machine with an NVIDIA GPU (a minute)
    python benchmarks/ttft.py --cpu           a tiny model, to test the script
"""

import argparse
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from gpu_work import synchronize, wait_locked
from measure import Report, median
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from gpu_agent.engines.transformers import TransformersAdapter, cache_argument
from gpu_agent.kernels.available import transfer_for
from kvstore import Client, client_config, prefix_hashes
from kvstore.tools.node_process import NodeProcess

ONE_B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
}
TINY = {
    **ONE_B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
QUESTION_TOKENS = 64
RUNS = 5


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds, result) of a call."""
    synchronize()
    begun = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - begun, result


def copy_gb_s(nbytes: int) -> float:
    """Measure a page-locked copy to the GPU; return GB/s."""
    if not torch.cuda.is_available():
        return float("nan")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        gpu.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return nbytes / median(found) / 1e9


@torch.inference_mode()
def measure(
    client: Client, adapter: TransformersAdapter, model: Any, tokens: int, runs: int
) -> dict[str, Any]:
    """Measure one prompt length."""
    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)
    prompt = ids[0].tolist()

    def cold() -> Any:
        cache = DynamicCache()
        return model(ids, **{cache_argument(model): cache}, logits_to_keep=1).logits, cache

    def stored() -> Any:
        load_s, (cache, count) = seconds(lambda: adapter.load(prompt[:-1]))
        assert count >= tokens - QUESTION_TOKENS - adapter.namespace.layout.page_tokens, count
        return (
            load_s,
            count,
            model(ids[:, count:], **{cache_argument(model): cache}, logits_to_keep=1).logits,
        )

    cold()
    cold_s, (expected, cache) = min((seconds(cold) for _ in range(2)), key=lambda pair: pair[0])
    colds = [cold_s] + [seconds(cold)[0] for _ in range(runs - 1)]
    keep = (
        (tokens - QUESTION_TOKENS)
        // adapter.namespace.layout.page_tokens
        * adapter.namespace.layout.page_tokens
    )
    saved = adapter.save(cache, prompt[:keep]).done.result(60.0)
    assert saved.dropped == 0, saved
    del cache
    hashes = prefix_hashes(prompt[:keep], adapter.namespace.layout.page_tokens)
    wait_locked(client, adapter.namespace, hashes, transfer_for(device))
    pcie = copy_gb_s(256 << 20)
    stored()
    found = [seconds(stored) for _ in range(runs)]
    load_s = median([result[0] for _, result in found])
    logits = found[0][1][2]
    nbytes = keep // adapter.namespace.layout.page_tokens * adapter.namespace.layout.page_nbytes
    return {
        "prompt tokens": f"{tokens:,}",
        "KV MiB loaded": nbytes >> 20,
        "cold ms": f"{median(colds) * 1e3:.1f}",
        "stored ms": f"{median([s for s, _ in found]) * 1e3:.1f}",
        "speed-up": f"{median(colds) / median([s for s, _ in found]):.1f}",
        "of that load ms": f"{load_s * 1e3:.1f}",
        "PCIe share of load": f"{nbytes / (pcie * 1e9) / load_s:.2f}" if pcie == pcie else None,
        "same next token": bool((logits.argmax(-1) == expected.argmax(-1)).all()),
    }


def main(argv: list[str]) -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cpu", action="store_true", help="no GPU: a tiny model, short prompts")
    options.add_argument("--json", action="store_true")
    args = options.parse_args(argv)
    torch.manual_seed(1)
    device = torch.device("cpu" if args.cpu else "cuda")
    with device:
        settings: dict[str, Any] = {
            **(TINY if args.cpu else ONE_B),
            "attn_implementation": "sdpa",
        }
        config = LlamaConfig(**settings)
        model = LlamaForCausalLM(config).to(torch.float32 if args.cpu else torch.bfloat16).eval()
    lengths = (256, 512) if args.cpu else (8192, 32768)
    report = Report("Time to first token", "python benchmarks/ttft.py")
    with (
        NodeProcess(
            "--ram-bytes", "1GiB" if args.cpu else "8GiB", "--log-level", "WARNING"
        ) as node,
        Client(client_config(address=node.address, timeout_s=60.0)) as client,
        TransformersAdapter(client, model, f"benchmark {uuid.uuid4()}", "random") as adapter,
    ):
        report.rows = [
            measure(client, adapter, model, tokens, 2 if args.cpu else RUNS) for tokens in lengths
        ]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        report.notes.append(
            f"{parameters / 1e9:.2f} B parameters, {model.dtype}; over the {client.wire_name} wire"
        )
        report.notes.append(f"moved by {type(transfer_for(model.device)).__name__}")
    report.show(args.json)


if __name__ == "__main__":
    main(sys.argv[1:])
