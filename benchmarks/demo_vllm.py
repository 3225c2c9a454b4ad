"""Run `make demo-vllm`: a second vLLM server on the CPU answers from the first one's KV.

    this process   starts a node, then one after the other
      server 1     vLLM's OpenAI-compatible server: computes a long prompt, and stores its KV
      server 2     another one, new: is asked the same, and finds the KV in the store

Exit status 0 only if the second server found every full block of the prompt and its tokens equal
the first one's.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo import status_of
from vllm_server import Server, ServerFailed, save_llama, store_config

from kvstore.tools.node_process import NodeProcess

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # without it the output is plain lines
    Console = Table = None  # type: ignore[assignment, misc]

BLOCK_TOKENS = 32
GENERATED_TOKENS = 16
VOCABULARY = 512


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Show a step with a running clock on a terminal."""
    start = time.perf_counter()
    if Console is None or not sys.stderr.isatty():
        yield
        return
    console = Console(stderr=True)
    with console.status(f"{text} ..."):
        yield
    console.print(f"  {text}: {time.perf_counter() - start:.1f} s")


def ask(model: Path, address: str, prompt: list[int], wait_pages: int) -> dict[str, Any]:
    """Start a server, ask one question, wait for `wait_pages` stored pages, and stop it."""
    # A second server that starts on a busy machine may wait longer than a user's.
    config = store_config(address, lookup_timeout_s=10.0)
    with Server(model, config, max_model_len=len(prompt) + GENERATED_TOKENS) as server:
        server.wait_up()
        # A process's first request is slow; this one is too short to be stored
        server.complete([7] * 16)
        answer = server.complete(prompt, GENERATED_TOKENS)
        stored = server.wait_metric("vllm:kvstore_pages_saved_total", wait_pages)
        found = server.metrics()
        status = server.close()
    return {
        "ttft_s": answer.ttft_s,
        "cached_tokens": answer.cached_tokens,
        "tokens": answer.tokens,
        "pages_stored": int(stored),
        "pages_loaded": int(found.get("vllm:kvstore_pages_loaded_total", 0)),
        "loaded_nbytes": int(found.get("vllm:kvstore_loaded_nbytes_total", 0)),
        "exit_status": status,
    }


def demo(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    blocks = args.tokens // BLOCK_TOKENS
    numbers = random.Random(0)
    prompt = [numbers.randrange(3, VOCABULARY) for _ in range(args.tokens)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        with step(f"making a Llama with random weights, {args.layers} layers x {args.hidden}"):
            save_llama(folder / "model", args.layers, args.hidden, VOCABULARY)
        with step("starting a node with 1 GiB of RAM tier"):
            python = os.environ.get("KVSTORE_NODE_PYTHON", sys.executable)
            node = stack.enter_context(
                NodeProcess("--ram-bytes", "1GiB", "--extent-bytes", "64MiB", python=python)
            )
        with step("server 1 starts, computes the prompt, stores its KV and ends"):
            first = ask(folder / "model", node.address, prompt, blocks)
        with step("server 2 starts and answers from it"):
            second = ask(folder / "model", node.address, prompt, 0)
    result = {
        "prompt_tokens": args.tokens,
        "first": first,
        "second": second,
        "tokens_equal": first["tokens"] == second["tokens"],
        "all_found": second["cached_tokens"] >= (args.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
    }
    equal = bool(
        result["tokens_equal"] and result["all_found"] and len(first["tokens"]) == GENERATED_TOKENS
    )
    if args.json:
        print(json.dumps(result | {"equal": equal}))
    else:
        show(result)
    return 0 if equal else 1


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the table's rows."""
    first, second = result["first"], result["second"]
    faster = f"{first['ttft_s'] / second['ttft_s']:.1f}x"
    return [
        ("", "server 1", "server 2"),
        ("prompt tokens", f"{result['prompt_tokens']:,}", f"{result['prompt_tokens']:,}"),
        ("of them from the store", f"{first['cached_tokens']:,}", f"{second['cached_tokens']:,}"),
        (
            "time to first token",
            f"{first['ttft_s'] * 1e3:,.0f} ms",
            f"{second['ttft_s'] * 1e3:,.0f} ms ({faster})",
        ),
        ("pages stored", str(first["pages_stored"]), str(second["pages_stored"])),
        (
            "pages loaded",
            str(first["pages_loaded"]),
            f"{second['pages_loaded']} ({second['loaded_nbytes'] / (1 << 20):.1f} MiB)",
        ),
        (f"{GENERATED_TOKENS} tokens", "", "equal" if result["tokens_equal"] else "DIFFERENT"),
    ]


def show(result: dict[str, Any]) -> None:
    """Print the result."""
    lines = rows(result)
    if Table is None:
        print(*(f"{name:24}{one:>14}{two:>24}" for name, one, two in lines), sep="\n")
        return
    table = Table(*lines[0], title="vLLM: KV of server 1, found by server 2")
    for line in lines[1:]:
        table.add_row(*line)
    Console().print(table)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--tokens", type=int, default=2000, help="of the prompt (%(default)s)")
    found.add_argument("--layers", type=int, default=12, help="of the random model (%(default)s)")
    found.add_argument(
        "--hidden", type=int, default=768, help="its width, a multiple of 192 (%(default)s)"
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def main(argv: list[str]) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    return status_of(lambda: demo(args), "demo-vllm", ServerFailed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
