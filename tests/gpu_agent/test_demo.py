"""`make demo` with a small model: two processes, one node, equal logits.

The exit status tells whether they are equal.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lazily import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from waiting import PATIENT

from kvstore import Client, ClientConfig
from kvstore.tools.node_process import NodeProcess

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "demo.py"
PROCESS = SCRIPT.with_name("demo_process.py")
SMALL = ["--size", "tiny", "--tokens", "512"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(
        "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(60))
    )
    return path


def module(path: Path) -> ModuleType:
    """Import a script as a module, since benchmarks/ is not a package."""
    spec = importlib.util.spec_from_file_location(f"kvstore_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    """Connect with the default wire, as the demo does."""
    with Client(ClientConfig(address=shared_node.address, **PATIENT)) as client:
        yield client


@pytest.mark.long
def test_second_process_gives_the_same_answer_from_loaded_pages(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process is the first one, which saves, since it has imported transformers.

    The second one is a new process.
    """
    demo, process = module(SCRIPT), module(PROCESS)
    start_child, roles = demo.run_child, []

    def run_child(role: str, address: str, args: argparse.Namespace) -> Any:
        roles.append(role)
        if role == "answer":
            return start_child(role, address, args)
        with Client(ClientConfig(address=address)) as client:
            subject = process.Subject(args, client)
            with subject.adapter:
                return process.save_document(subject, client)

    monkeypatch.setattr(demo, "run_child", run_child)
    # Small, since a node writes all of its memory at its start.
    monkeypatch.setattr(demo, "NODE_FLAGS", ("--ram-bytes", "16MiB"))
    status = demo.main([*SMALL, "--text", str(text), "--json"])
    output = capsys.readouterr()
    assert (status, output.err, roles) == (0, "", ["save", "answer"]), output.out
    result = json.loads(output.out)
    assert (
        result["equal"]
        is result["kv_equal"]
        is result["logits_equal"]
        is result["tokens_equal"]
        is True
    )
    assert result["kv_saved"] == result["kv_loaded"] == result["kv_computed"]
    assert result["pages_stored"] == result["pages"] == 8
    assert result["tokens_loaded"] == 512
    assert result["one_shot_difference_max"] < 1e-3


def test_model_on_disk_with_its_own_tokenizer(client: Client, text: Path, tmp_path: Path) -> None:
    process = module(PROCESS)
    words = sorted({word for line in (text.read_text(), process.QUESTION) for word in line.split()})
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0} | {word: i + 1 for i, word in enumerate(words)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        tmp_path / "tiny-on-disk"
    )
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=256, num_key_value_heads=2, dtype="bfloat16", **process.SIZES["tiny"]
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
        tmp_path / "tiny-on-disk"
    )

    args = argparse.Namespace(
        model=str(tmp_path / "tiny-on-disk"), text=str(text), tokens=512, page_tokens=64
    )
    subject = process.Subject(args, client)
    with subject.adapter:
        assert process.save_document(subject, client)["document_prefill_ms"] > 0
        result = process.answer_question(subject, client)
    assert (result["model"], result["dtype"]) == ("tiny-on-disk", "bfloat16")
    assert (result["tokens_loaded"], result["pages"]) == (512, 8)
    assert result["logits_equal"] is result["tokens_equal"] is True


@pytest.mark.parametrize(
    "wrong",
    [{"logits_equal": False}, {"tokens_equal": False}, {"tokens_loaded": 448}, {"kv_loaded": "b"}],
)
def test_difference_sets_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    good = {
        "logits_equal": True,
        "tokens_equal": True,
        "tokens_loaded": 512,
        "document_tokens": 512,
    }
    good |= {"kv_saved": "a", "kv_loaded": "a"}

    class NoNode:
        address = "127.0.0.1:1"

        def __init__(self, *flags: str) -> None: ...
        def __enter__(self) -> "NoNode":
            return self

        def __exit__(self, *_: object) -> None: ...

    demo = module(SCRIPT)
    monkeypatch.setattr(demo, "NodeProcess", NoNode)
    monkeypatch.setattr(demo, "run_child", lambda *_: good)
    assert demo.main(["--json"]) == 0
    monkeypatch.setattr(demo, "run_child", lambda *_: good | wrong)
    assert demo.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"] is False


def test_failed_child_ends_the_demo_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = module(SCRIPT)
    (tmp_path / "demo_process.py").write_text(
        "import sys; print('words of', *sys.argv[1:4], file=sys.stderr); exit(3)"
    )
    monkeypatch.setattr(demo, "HERE", tmp_path)
    with pytest.raises(
        SystemExit, match=r"that should save failed:\nwords of save --address 127.0.0.1:9$"
    ):
        demo.run_child("save", "127.0.0.1:9", demo.parser().parse_args(SMALL))


def test_too_short_text_fails_with_a_message(client: Client, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hi")
    arguments = ["save", "--address", client.config.address, *SMALL, "--text", str(short)]
    with pytest.raises(SystemExit, match="gives 2 tokens, less than a page"):
        module(PROCESS).main(arguments)
