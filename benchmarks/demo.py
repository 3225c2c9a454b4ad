"""Run `make demo`: the KV of one process, loaded by another through a real node.

    this process   starts a node, then one after the other (demo_process.py)
      process 1    prefills a document and saves its KV
      process 2    asks about the document: looks up, loads, prefills only the question; then does
                   the same without the store and compares logits and generated tokens

Exit status 0 only if process 2's logits equal, bit by bit, those of a run without the store that
cuts the forward pass at the same token.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore import KVStoreError
from kvstore.tools.node_process import NodeProcess

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # the cli extra: without it the table is plain text
    Console = Table = None  # type: ignore[assignment, misc]

HERE = Path(__file__).resolve().parent
NODE_FLAGS = ("--ram-bytes", "1GiB", "--extent-bytes", "64MiB")


def run_child(role: str, address: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run demo_process.py in a fresh interpreter and return its result.

    Ends the demo with its words if it fails.
    """
    flags = {
        "text": args.text,
        "tokens": args.tokens,
        "page-tokens": args.page_tokens,
        "size": args.size,
    }
    if args.model:
        flags["model"] = args.model
    command = [sys.executable, str(HERE / "demo_process.py"), role, "--address", address]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the process that should {role} failed:\n{done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Show a step on a terminal, and how long it took."""
    shown = sys.stderr.isatty()
    if shown:
        print(f"  {text} ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    yield
    if shown:
        print(f" {time.perf_counter() - start:.1f} s", file=sys.stderr)


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the table's rows."""
    with_ms = result["lookup_ms"] + result["load_ms"] + result["prefill_with_ms"]
    return [
        (
            "model",
            f"{result['model']}, {result['layers']} layers, {result['dtype']}, {result['device']}",
        ),
        (
            "prompt",
            f"{result['document_tokens']:,} tokens of document + {result['question_tokens']} of "
            "question",
        ),
        ("pages loaded", f"{result['pages']}, over the {result['wire']} wire"),
        ("MiB loaded", f"{result['mib']:.1f}"),
        ("save, process 1", f"{result['save_ms']:.1f} ms"),
        ("lookup", f"{result['lookup_ms']:.1f} ms"),
        ("load", f"{result['load_ms']:.1f} ms"),
        ("prefill with the store", f"{result['prefill_with_ms']:.1f} ms (the question only)"),
        ("prefill without", f"{result['prefill_without_ms']:.1f} ms"),
        (
            "speed-up",
            f"{result['speed_up']:.1f}x ({with_ms:.1f} ms instead of "
            f"{result['prefill_without_ms']:.1f})",
        ),
        ("KV, process 1 and 2", "equal bit by bit" if result["kv_equal"] else "DIFFERENT"),
        ("logits, same split", "equal bit by bit" if result["logits_equal"] else "DIFFERENT"),
        (
            f"{result['generated_tokens']} generated tokens",
            "equal" if result["tokens_equal"] else "DIFFERENT",
        ),
        (
            "logits, one-shot prefill",
            f"max difference {result['one_shot_difference_max']:.2g}, "
            f"{'same' if result['one_shot_argmax_equal'] else 'other'} next token",
        ),
    ]


def show(result: dict[str, Any]) -> None:
    """Print the result."""
    title = "KV of process 1, loaded by process 2"
    if Table is None:
        width = max(len(name) for name, _ in rows(result))
        print(title, *(f"  {name:{width}}  {value}" for name, value in rows(result)), sep="\n")
        return
    table = Table(title=title, show_header=False)
    for name, value in rows(result):
        table.add_row(name, value)
    Console().print(table)


def hints(result: dict[str, Any], address: str, folder: str) -> list[str]:
    """Return commands to look around with, and write the document's tokens to `folder`."""
    command = (
        "kvstore"
        if shutil.which("kvstore")
        else os.path.relpath(Path(sys.executable).with_name("kvstore"))
    )
    base = f"{command} --address {address}"
    tokens = Path(folder, "tokens.json")
    tokens.write_text(json.dumps(result["document"]))
    return [
        f"{base} status",
        f"{base} ls",
        f"{base} lookup --tokens-file {tokens}",
        f"{base} get {result['first_key'][:12]} --decode",
        f"{base} top",
    ]


def demo(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    with contextlib.ExitStack() as stack:
        with step("starting a node with 1 GiB of RAM tier"):
            node = stack.enter_context(NodeProcess(*NODE_FLAGS))
        with step("process 1 prefills the document and saves its KV"):
            result = run_child("save", node.address, args)
        with step("process 2 loads it, answers, and does the same without the store"):
            result |= run_child("answer", node.address, args)
        whole = result["tokens_loaded"] == result["document_tokens"]
        result["kv_equal"] = result["kv_saved"] == result["kv_loaded"]
        equal = whole and result["kv_equal"] and result["logits_equal"] and result["tokens_equal"]
        if args.json:
            shown = {key: value for key, value in result.items() if key != "document"}
            print(json.dumps(shown | {"equal": equal, "address": node.address}))
        else:
            show(result)
            if not whole:
                print(
                    f"only {result['tokens_loaded']} of {result['document_tokens']} tokens came "
                    "back"
                )
        if args.keep:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-"))
            lines = hints(result, node.address, folder)
            print(
                "\nThe node runs until Ctrl-C. In another terminal:",
                *lines,
                sep="\n  ",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
        elif not args.json:
            print(
                "\nThe node is gone now. To look around with the CLI, keep it: make demo "
                "ARGS=--keep"
            )
            print("  then try: kvstore status | ls | lookup | get --decode | top, each with --help")
    return 0 if equal else 1


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--model", metavar="PATH", help="directory of a model; default: random weights, fixed seed"
    )
    found.add_argument(
        "--text",
        default=str(HERE.parent / "LICENSE"),
        metavar="FILE",
        help="the document (%(default)s)",
    )
    found.add_argument(
        "--tokens", type=int, default=4096, help="tokens of the document at most (%(default)s)"
    )
    found.add_argument("--page-tokens", type=int, default=64, help="tokens per page (%(default)s)")
    found.add_argument(
        "--size",
        choices=("auto", "tiny", "cpu", "gpu"),
        default="auto",
        help="size of the random model (%(default)s)",
    )
    found.add_argument("--json", action="store_true", help="print one JSON object")
    found.add_argument(
        "--keep", action="store_true", help="keep the node until Ctrl-C, to try the CLI"
    )
    return found


def status_of(run: Callable[[], int], name: str = "demo", *errors: type[Exception]) -> int:
    """Exit status of a demo.

    An error of the store, or one of these, is its last word; no node of it outlives it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run()
    except (KVStoreError, *errors) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; its nodes are stopped", file=sys.stderr)
        return 130


def main(argv: list[str]) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    return status_of(lambda: demo(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
