"""Every command against a real node: its output, effect and exit code."""

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore import Client, LayerGroup, Namespace, PageLayout, Plane
from kvstore.cli.commands import build

Kvstore = Callable[..., Any]
IDS = ",".join(str(token) for token in range(100, 112))  # the prompt of the `hashes` fixture

TRACE = [
    {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids}
    for ids in ([0, 1], [0, 1, 2], [0, 9])
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return path


def test_every_command_prints_one_json_value_with_json(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], tmp_path: Path, trace: Path
) -> None:
    page = tmp_path / "page"
    page.write_bytes(bytes(space.layout.page_nbytes))
    named = ["--model", space.model]
    arguments = {
        "status": [],
        "top": ["--interval", "0.05", "--once"],
        "ls": named,
        "stat": [*named, hashes[0].hex()],
        "lookup": [*named, "--tokens", IDS],
        "query": [*named, "--tokens", IDS],
        "get": [*named, hashes[0].hex(), "--decode"],
        "put": [str(page), "ab" * 32, *named],
        "pin": [*named, hashes[0].hex()],
        "unpin": [*named, hashes[0].hex()],
        "verify": [*named, "--all"],
        "rm": [*named, hashes[0].hex()],
        "forget": ["--tenant", "nobody", "--yes"],
        "doctor": ["--timeout", "20"],
        "bench": ["--seconds", "0.02", "--page-nbytes", "4KiB", "--batch", "2"],
        "replay": [str(trace)],
        "plan": [str(trace)],
    }
    on_disk = {"flush", "scrub", "recover"}  # need a node with a data directory: test_disk.py
    endless = {"feed", "events"}  # test_feed.py, test_events.py
    with_others = {"record"}  # needs calls of other clients: test_record.py
    assert set(arguments) | on_disk | endless | with_others == {
        command.name for command in build().registered_commands
    }
    for name, given in arguments.items():
        ran = kvstore(name, *given, "--json")
        assert (ran.code, ran.stderr) == (0, ""), name
        assert isinstance(ran.json, dict | list), name
        # 1 if the page is already removed or no longer pinned
        assert kvstore("--json", name, *given).code in (0, 1), name


def commands_of(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command, those in groups too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, *names, name)
        else:
            yield (*names, name)


def test_every_command_has_help_with_an_example(kvstore: Kvstore) -> None:
    for words in commands_of(typer.main.get_command(build())):
        ran = kvstore(*words, "--help")
        assert ran.code == 0
        assert re.search(rf"^  Examples?:\n    kvstore .*{words[-1]}", ran.stdout, re.MULTILINE), (
            words
        )
        assert "--json" in ran.stdout
        assert "\\b" not in ran.stdout, "the help shows its markup"
        assert "<" not in ran.stdout.partition("Options:")[0].partition("Arguments:")[2], words


def test_usage_shows_arguments_in_the_usual_form(kvstore: Kvstore) -> None:
    for words, arguments in {
        ("put",): "FILE [KEY]...",
        ("certs", "node"): "HOST...",
        ("context", "show"): "[NAME]",
    }.items():
        usage = kvstore(*words, "--help").stdout.splitlines()[0]
        assert usage == f"Usage: kvstore {' '.join(words)} [OPTIONS] {arguments}"


def test_lists_of_commands_show_whole_sentences(kvstore: Kvstore) -> None:
    """Regression: half of them were cut in the middle of their first sentence."""
    for words in ((), ("cluster",), ("tenants",), ("certs",), ("context",), ("identities",)):
        listed = kvstore(*words, "--help").stdout.partition("Commands:")[2]
        assert listed, words
        assert "..." not in listed, words


def test_help_lists_exit_codes_and_version_is_printed(kvstore: Kvstore) -> None:
    ran = kvstore("--help")
    assert all(f"\n    {code}    " in ran.stdout for code in range(6))
    assert kvstore("--version").stdout.startswith("kvstore 0.")


def test_every_command_without_json_prints_text(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], trace: Path
) -> None:
    named = ["--model", space.model]
    key = hashes[0].hex()
    for arguments in (
        ["status"],
        ["top", "--once", "--interval", "0.05"],
        ["ls"],
        ["ls", *named],
        ["stat", *named, key],
        ["lookup", *named, "--tokens", IDS],
        ["get", *named, key, "--decode"],
        ["pin", *named, key],
        ["unpin", *named, key],
        ["verify", *named, key],
        ["bench", "--seconds", "0.02", "--page-nbytes", "4KiB"],
        ["replay", str(trace)],
        ["rm", *named, key],
    ):
        ran = kvstore(*arguments)
        assert ran.code == 0, arguments
        assert ran.stdout.strip(), arguments
        assert not ran.stdout.lstrip().startswith(("{", "[")), arguments


# ---- status and ls ---------------------------------------------------------------------------


def test_r15_status_shows_misses_by_reason_and_hints_at_the_differing_field(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    reader = dataclasses.replace(space, revision="other")
    client.lookup(reader, hashes)
    ran = kvstore("status", "--json")
    counters = {entry["digest"]: entry["counters"] for entry in ran.json["namespaces"]}[
        reader.digest.hex()
    ]
    assert (counters["pages_asked"], counters["prefix_hits"], counters["miss_absent"]) == (3, 0, 3)
    assert any(
        space.model in hint and "revision (other, there empty)" in hint
        for hint in ran.json["hints"]
    )
    ran = kvstore("status")
    assert "revision (other, there empty)" in ran.stderr
    assert "ABSENT" in ran.stdout


def test_ls_lists_namespaces_with_layout(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes]
) -> None:
    (entry,) = [
        entry
        for entry in kvstore("ls", "--json").json["namespaces"]
        if entry["model"] == space.model
    ]
    assert entry["digest"] == space.digest.hex()
    assert entry["layout_fingerprint"] == space.layout.fingerprint.hex()
    assert (entry["page_tokens"], entry["page_nbytes"], entry["page_count"]) == (
        4,
        space.layout.page_nbytes,
        3,
    )


def test_ls_lists_pages_in_the_order_of_their_keys(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes]
) -> None:
    pages = kvstore("ls", "-n", space.digest.hex(), "--json").json["pages"]
    assert [page["prefix_hash"] for page in pages] == sorted(h.hex() for h in hashes)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_ls_by_prefix_takes_an_odd_number_of_digits(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes], digits: int
) -> None:
    start = hashes[1].hex()[:digits]
    pages = kvstore("ls", "-m", space.model, "--prefix", start.upper(), "--json").json["pages"]
    assert [page["prefix_hash"] for page in pages] == sorted(
        h.hex() for h in hashes if h.hex().startswith(start)
    )


def test_ls_reports_its_limit(kvstore: Kvstore, space: Namespace, hashes: list[bytes]) -> None:
    ran = kvstore("ls", "-m", space.model, "--limit", "2", "--json")
    assert (len(ran.json["pages"]), ran.json["more"]) == (2, True)
    assert "--limit 0" in ran.stderr
    for limit in ("0", "3"):
        ran = kvstore("ls", "-m", space.model, "--limit", limit, "--json")
        assert (len(ran.json["pages"]), ran.json["more"], ran.stderr) == (3, False, "")


def test_ls_of_nothing_exits_1(kvstore: Kvstore, client: Client, space: Namespace) -> None:
    client.open(space)
    ran = kvstore("ls", "-m", space.model, "--json")
    assert (ran.code, ran.json["pages"]) == (1, [])


# ---- stat, lookup, pin, verify, rm -----------------------------------------------------------


def test_stat_accepts_the_start_of_a_key_and_exits_1_without_a_page(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes]
) -> None:
    (page,) = kvstore("stat", "-m", space.model, hashes[0].hex()[:11], "--json").json["pages"]
    assert (page["prefix_hash"], page["present"]) == (hashes[0].hex(), True)
    ran = kvstore("stat", "-m", space.model, "00" * 32, hashes[1].hex(), "--json")
    assert (ran.code, [page["present"] for page in ran.json["pages"]]) == (0, [False, True])
    assert kvstore("stat", "-m", space.model, "00" * 32).code == 1


def test_lookup_prints_the_tokens_covered(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    client.remove(space, [hashes[1]])
    ran = kvstore("lookup", "-m", space.model, "--tokens", IDS, "--json")
    found = ran.json
    assert (ran.code, found["prefix_pages"], found["tokens_covered"], found["pages_present"]) == (
        0,
        1,
        4,
        2,
    )
    assert [page["present"] for page in found["pages"]] == [True, False, True]
    ran = kvstore("lookup", "-m", space.model, "--tokens", "1," + IDS)
    assert ran.code == 1
    assert "prefix 0 of 3 pages, 0 tokens" in ran.stdout


def test_lookup_reads_tokens_from_stdin(
    kvstore: Kvstore, space: Namespace, hashes: list[bytes]
) -> None:
    ran = kvstore(
        "lookup", "-m", space.model, "--tokens-file", "-", "--json", stdin=f"[{IDS}]".encode()
    )
    assert ran.json["prefix_pages"] == 3


def test_pin_and_unpin(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    ran = kvstore("pin", "-m", space.model, hashes[0].hex(), "00" * 32, "--ttl", "1h", "--json")
    assert (ran.code, ran.json["pinned"], ran.json["ttl_s"]) == (0, 1, 3600)
    assert 0 < client.stat(space, hashes[:1])[0].pin_ttl_ms <= 3_600_000
    assert kvstore("unpin", "-m", space.model, hashes[0].hex()).code == 0
    assert client.stat(space, hashes[:1])[0].pin_ttl_ms == 0
    assert kvstore("unpin", "-m", space.model, hashes[0].hex()).code == 1
    assert kvstore("pin", "-m", space.model, hashes[0].hex(), "--ttl", "9000d").code == 2


def test_verify_counts_pages(kvstore: Kvstore, space: Namespace, hashes: list[bytes]) -> None:
    counts = kvstore("verify", "-m", space.model, "--all", "--json").json
    assert (counts["intact"], counts["dropped"], counts["absent"]) == (3, 0, 0)
    ran = kvstore("verify", "-m", space.model, "00" * 32, "--json")
    assert (ran.code, ran.json["absent"]) == (1, 1)


def test_rm_removes_named_pages_only(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    ran = kvstore("rm", "-m", space.model, hashes[1].hex(), "00" * 32, "--json")
    assert (ran.json["removed"], ran.json["absent"]) == (1, 1)
    assert client.lookup(space, hashes).present == (True, False, True)
    assert kvstore("rm", "-m", space.model, hashes[1].hex()).code == 1
    assert kvstore("rm", "-m", space.model, "--tokens", IDS).stdout == "removed 2 of 3 pages\n"


def test_rm_all_needs_a_namespace_and_yes(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    assert "add --yes" in kvstore("rm", "-m", space.model, "--all").stderr
    assert kvstore("rm", "--all", "--yes").code == 2
    assert client.lookup(space, hashes).prefix_pages == 3
    ran = kvstore("rm", "-m", space.model, "--all", "--yes", "--json")
    assert (ran.code, ran.json["removed"]) == (0, 3)
    assert client.lookup(space, hashes).present == (False, False, False)


def test_forget_needs_yes_and_erases_one_tenant(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    gone = dataclasses.replace(space, tenant="gone")
    content = b"of the tenant that is erased" * 20
    client.put(gone, hashes, [content[: space.layout.page_nbytes]] * 3)
    refused = kvstore("forget", "--tenant", "gone")
    assert (refused.code, refused.stdout) == (2, "")
    assert (
        "Erase 1 namespaces of gone with 3 pages? There is no terminal to confirm on; add --yes"
        in refused.stderr
    )
    assert client.lookup(gone, hashes).prefix_pages == 3
    reply = kvstore("forget", "--tenant", "gone", "--yes", "--json").json
    assert reply["ram_nbytes"] > 0
    assert reply == {
        **{
            "tenant": "gone",
            "namespaces": 1,
            "pages": 3,
            "ram_nbytes": reply["ram_nbytes"],
            "plain_disk": False,
        },
        **{"keys_destroyed": 0, "left": 0, "why": []},
    }
    assert client.lookup(space, hashes).prefix_pages == 3
    assert client.lookup(gone, hashes).prefix_pages == 0
    ran = kvstore("forget", "--tenant", "gone", "--yes")
    assert "gone: 0 pages of 1 namespaces are gone" in ran.stdout
    assert "left: 0" in ran.stdout
    assert kvstore("forget", "--tenant", "", "--yes").code == 2
    assert "--tenant" in kvstore("forget", "--yes").stderr


# ---- get and put -----------------------------------------------------------------------------


def test_get_returns_the_bytes_of_put(kvstore: Kvstore, tmp_path: Path, space: Namespace) -> None:
    data = hashlib.shake_128(space.model.encode()).digest(10_000)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    ran = kvstore("put", str(source), "--create-opaque", space.model, "--tokens", "7,8,9", "--json")
    assert (ran.code, ran.json["stored"], ran.json["page_nbytes"]) == (0, 1, 10_000)
    key = ran.json["pages"][0]["prefix_hash"]
    assert kvstore("get", "-m", space.model, key).data == data
    ran = kvstore("get", "-m", space.model, "--tokens", "7,8,9", "-o", str(target), "--json")
    assert ran.json["file"] == str(target)
    assert target.read_bytes() == data
    assert kvstore("put", str(source), key, "-m", space.model, "--json").json["exists"] == 1


def test_put_of_a_prompt_cuts_the_file_into_pages(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    client.open(space)
    data = b"".join(bytes([i]) * space.layout.page_nbytes for i in (7, 8, 9))
    ran = kvstore("put", "-", "-m", space.model, "--tokens", IDS, "--json", stdin=data)
    assert (ran.code, ran.json["stored"]) == (0, 3)
    assert kvstore("get", "-m", space.model, "--tokens", IDS).data == data


def test_put_of_another_size_is_refused_and_stores_nothing(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    client.open(space)
    nbytes = space.layout.page_nbytes
    for data in (b"", b"x", bytes(nbytes - 1), bytes(nbytes + 1), bytes(2 * nbytes)):
        ran = kvstore("put", "-", "ab" * 16, "-m", space.model, stdin=data)
        assert ran.code == 2
        assert "kvstore: stdin " in ran.stderr
    assert kvstore("ls", "-m", space.model).code == 1


def test_get_of_a_missing_page_writes_no_file(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes], tmp_path: Path
) -> None:
    client.remove(space, [hashes[2]])
    target = tmp_path / "out"
    ran = kvstore("get", "-m", space.model, "--tokens", IDS, "-o", str(target), "--json")
    assert (ran.code, ran.error["kind"]) == (1, "Miss")
    assert hashes[2].hex() in ran.error["error"]
    assert not target.exists()


def test_get_does_not_count_as_a_lookup(
    kvstore: Kvstore, client: Client, space: Namespace, hashes: list[bytes]
) -> None:
    kvstore("get", "-m", space.model, "--tokens", IDS, "--json")
    (counters,) = [info.counters for known, info in client.namespaces() if known == space]
    assert counters.pages_asked == 0


def test_get_of_a_layer_and_its_statistics(
    kvstore: Kvstore, client: Client, space: Namespace
) -> None:
    layout = PageLayout(
        2, (LayerGroup("kv", (0, 1), (Plane("k", "float16", (2,)), Plane("s", "uint8", (1,)))),)
    )
    space = dataclasses.replace(space, layout=layout)
    page = b"".join(struct.pack("<4e", *([n] * 4)) + bytes([n, 0]) for n in (3, 5))
    client.put(space, [b"k" * 32], [page])
    key = (b"k" * 32).hex()
    assert kvstore("get", "-m", space.model, key, "--layer", "1").data == page[10:]
    ran = kvstore("get", "-m", space.model, key, "--layer", "1", "--decode", "--json")
    planes = [
        (p["plane"], p["shape"], p["min"], p["max"], p["zero_count"])
        for p in ran.json["pages"][0]["planes"]
    ]
    assert planes == [("k", [2, 2], 5.0, 5.0, 0), ("s", [2, 1], 0.0, 5.0, 1)]
    every = kvstore("get", "-m", space.model, key, "--decode", "--json").json["pages"][0]["planes"]
    assert [(p["layer"], p["plane"], p["mean"]) for p in every] == [
        (0, "k", 3.0),
        (0, "s", 1.5),
        (1, "k", 5.0),
        (1, "s", 2.5),
    ]
    ran = kvstore("get", "-m", space.model, key, "--layer", "2")
    assert ran.code == 2
    assert "layer 2 is not in the layout" in ran.stderr


# ---- replay and top --------------------------------------------------------------------------


def test_replay_without_an_address_starts_a_node(
    kvstore: Kvstore, trace: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_ADDRESS")
    before = client.node_status().totals.pages_put
    report = kvstore(
        "replay", str(trace), "--capacity-pages", "100", "--page-bytes", "4096", "--json"
    ).json
    wanted = {
        "requests": 3,
        "pages_asked": 7,
        "pages_hit": 3,
        "verified_nbytes": 3 * 4096,
        "mismatches": 0,
    }
    assert {name: report[name] for name in wanted} == wanted
    assert report["prefix_hit_rate"] == pytest.approx(3 / 7)
    assert client.node_status().totals.pages_put == before


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_replay_on_a_node_uses_it_and_removes_its_pages(
    kvstore: Kvstore, trace: Path, client: Client, wire: str
) -> None:
    before = client.node_status().totals.pages_put
    ran = kvstore(
        "replay", str(trace), "--wire", wire, "--page-bytes", "1KiB", "--limit", "2", "--json"
    )
    assert (ran.json["wire"], ran.json["requests"], ran.json["pages_hit"]) == (wire, 2, 2)
    assert client.node_status().totals.pages_put == before + 3
    assert not [
        known
        for known, info in client.namespaces()
        if known.model == "kvstore-replay" and info.page_count
    ]


def test_top_prints_one_object_per_sample(kvstore: Kvstore) -> None:
    ran = kvstore("top", "--json", "--count", "3", "--interval", "0.05")
    samples = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(samples) == 3
    assert all(
        sample["totals"]["asked_per_s"] == 0 and not sample["restarted"] for sample in samples
    )


# ---- which wire ------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_commands_use_the_wire_of_the_environment(
    kvstore: Kvstore,
    space: Namespace,
    hashes: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    wire: str,
) -> None:
    taken, close = [], Client.close

    def tell(client: Client) -> None:
        taken.append(client.wire_name)
        close(client)

    monkeypatch.setattr(Client, "close", tell)
    key, bench = hashes[0].hex(), ["bench", "--seconds", "0.02", "--page-nbytes", "4KiB"]
    assert kvstore("get", "-m", space.model, key, "--json").code == 0
    monkeypatch.setenv("KVSTORE_WIRE", wire)
    for arguments in (
        ["get", "-m", space.model, key, "--json"],
        ["status"],
        bench,
        [*bench, "--wire", "grpc"],
    ):
        assert kvstore(*arguments).code == 0
    assert taken == ["grpc", wire, wire, wire, "grpc"]
