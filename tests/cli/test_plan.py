"""`kvstore plan`: its table, texts and pictures; tests/plan checks the figures themselves."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Kvstore

from kvstore.cli import plan as module
from kvstore.cli.plan import recommendation
from kvstore.tools.plan import Plan, Wishes, planned, surveyed
from kvstore.tools.survey import PageSize, Sampling
from kvstore.tools.trace import chatting

PNG = b"\x89PNG\r\n\x1a\n"


def written(path: Path, count: int, at_a_time: int = 40, **more: Any) -> Path:
    with path.open("w") as file:
        for request in chatting(count, at_a_time=at_a_time):
            line = {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": 1,
            }
            file.write(json.dumps({**line, "hash_ids": request.hash_ids, **more}) + "\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "trace.jsonl", 400)


def test_trace_with_sessions_has_hit_rates_with_hints(kvstore: Kvstore, tmp_path: Path) -> None:
    path = written(tmp_path / "sessions.jsonl", 200, session="s")
    shown = kvstore("plan", str(path), "--ram", "1GiB", "--disk", "8GiB")
    assert "WITH HINTS" in shown.stdout
    rows = json.loads(kvstore("plan", str(path), "--ram", "1GiB", "--json").stdout)["rows"]
    assert 0 <= rows[0]["hit_rate_hinted"] <= rows[0]["bound"]
    plain = kvstore("plan", str(written(tmp_path / "plain.jsonl", 20)), "--ram", "1GiB")
    assert "WITH HINTS" not in plain.stdout


def test_table_has_a_line_for_each_pair_of_sizes_and_a_recommendation(
    kvstore: Kvstore, trace: Path
) -> None:
    ran = kvstore(
        "plan",
        str(trace),
        "--ram",
        "1GiB,4GiB",
        "--ram",
        "8GiB",
        "--disk",
        "64GiB",
        "--page-bytes",
        "1MiB",
    )
    assert ran.code == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("400 requests, ")
    assert "512 tokens, 1.0 MiB" in lines[0]
    assert [line.split()[:3] for line in lines if re.match(r" *\d\.0 GiB", line)] == [
        [size, "GiB", disk] for size in ("1.0", "4.0", "8.0") for disk in ("-", "64.0")
    ]
    assert [line for line in lines if line.startswith("* A store that never forgets would hit ")]
    assert [
        line for line in lines if line.startswith("* A disk of 64.0 GiB beside RAM of 8.0 GiB ")
    ]


def test_json_has_all_figures_and_the_recommendation(kvstore: Kvstore, trace: Path) -> None:
    found = kvstore(
        "plan", str(trace), "--ram", "1GiB", "--prefill-tokens-per-s", "5000", "--json"
    ).json
    row = found["rows"][0]
    assert row["ram_nbytes"] == 1 << 30
    assert row["pages"] == 16
    assert row["gpu_saved_s"] == pytest.approx(row["tokens_saved"] / 5000, abs=0.05)
    assert 0 < row["hit_rate"] <= row["bound"] <= found["endless"] < 1
    assert row["gets"]["peak"] >= row["gets"]["mean"] > 0
    assert "Llama 3 8B" in found["assumed"][0]
    assert found["recommendation"][0].startswith("A store that never forgets")


def test_two_runs_give_the_same_output(kvstore: Kvstore, trace: Path) -> None:
    assert (
        kvstore("plan", str(trace), "--json").stdout == kvstore("plan", str(trace), "--json").stdout
    )


def test_sample_shows_its_standard_error(kvstore: Kvstore, trace: Path) -> None:
    ran = kvstore("plan", str(trace), "--sample", "2", "--ram", "64GiB")
    assert ran.code == 0, ran.stderr
    assert "from 50.0 % of the pages; ± is one standard error" in ran.stdout
    assert re.search(r"\d % ±\d", ran.stdout)


def test_trace_with_many_pages_is_sampled_by_default() -> None:
    assert module._sample(None, module.EXACT_PAGES_MAX).rate == 1
    assert module._sample(None, 4 * module.EXACT_PAGES_MAX) == Sampling(8, 320)
    assert module._sample(1.0, 4 * module.EXACT_PAGES_MAX).rate == 1, "the user's rate was not used"


def test_pictures_are_drawn_and_load_no_other_files(
    kvstore: Kvstore, trace: Path, tmp_path: Path
) -> None:
    png, page = tmp_path / "plan.png", tmp_path / "plan.html"
    ran = kvstore("plan", str(trace), "--picture", str(png), "--picture", str(page), "--json")
    assert ran.code == 0, ran.stderr
    assert png.read_bytes().startswith(PNG)
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "<script" not in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text), "the page loads other files"
    assert "A store that never forgets" in text
    assert text.count("<tr>") == 1 + len(ran.json["rows"])


def test_picture_without_matplotlib_names_the_extra(
    kvstore: Kvstore, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = kvstore("plan", str(trace), "--picture", str(tmp_path / "plan.png"))
    assert ran.code == 2
    assert "kvstore-llm[plan]" in ran.stderr
    assert kvstore("plan", str(trace)).code == 0, "the table needs matplotlib"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ram", "lots"), "--ram 'lots' is not a size"),
        (("--ram", "1"), "--ram 1 must be at least a page"),
        (("--picture", "plan.pdf"), "must end with .png or .html"),
        (("--picture", "/nowhere/plan.png"), "there is no folder"),
        (("--sample", "0.5"), "--sample 0.5"),
        (("--limit", "0"), "--limit 0"),
        (("--copies", "0"), "--copies 0"),
        (("--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s"),
        (("--window", "0"), "--window"),
        (("--tokens-per-page", "-1"), "--tokens-per-page"),
        (("--model-config", "/nowhere"), "can not read /nowhere"),
        (("--page-bytes", "0"), "--page-bytes 0"),
        (("--page-bytes", "1e300"), "--page-bytes 1000"),
        (("--tokens-per-page", "inf"), "--tokens-per-page inf"),
        (("--tokens-per-page", "nan"), "--tokens-per-page nan"),
        (("--window", "inf"), "--window inf"),
        (("--prefill-tokens-per-s", "inf"), "--prefill-tokens-per-s inf"),
        (("--disk-gb-per-s", "inf"), "--disk-gb-per-s inf"),
        (("--sample", "inf"), "--sample inf"),
        (("--sample", "1e9"), "too few to say anything"),
        (("--limit", "9" * 30), "--limit 9999"),
        (("--copies", "9" * 400), "must be in 1..8"),
        (("--ram", "1e300"), "at most 1 EiB"),
    ],
)
def test_plan_with_an_invalid_option_is_refused(
    kvstore: Kvstore, trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = kvstore("plan", str(trace), *arguments)
    assert ran.code == 2
    assert message in ran.stderr


def test_missing_or_invalid_trace_is_refused(kvstore: Kvstore, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert kvstore("plan", str(path)).code == 2
    path.write_text("{}\n")
    ran = kvstore("plan", str(path))
    assert (ran.code, "line 1: timestamp is missing" in ran.stderr) == (2, True)


@pytest.mark.parametrize("name", ["timestamp", "input_length", "page_nbytes", "page_tokens"])
@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e308"])
def test_huge_numbers_are_refused_with_their_line(
    kvstore: Kvstore, tmp_path: Path, name: str, number: str
) -> None:
    path = tmp_path / "trace.jsonl"
    numbers = {"timestamp": "0", "input_length": "1", "output_length": "1", name: number}
    path.write_text(
        "{" + ",".join(f'"{key}":{value}' for key, value in numbers.items()) + ',"hash_ids":[1]}\n'
    )
    ran = kvstore("plan", str(path))
    assert (ran.code, f"line 1: {name} is " in ran.stderr) == (2, True)


def test_pipe_as_trace_is_refused(kvstore: Kvstore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = kvstore("plan", str(tmp_path / "pipe"))
    assert (ran.code, "is a pipe" in ran.stderr) == (2, True)


# ---- recommendation --------------------------------------------------------------------------


def words(kvstore: Kvstore, trace: Path, *arguments: str) -> str:
    ran = kvstore("plan", str(trace), "--page-bytes", "1MiB", "--json", *arguments)
    assert ran.code == 0, ran.stderr
    return " ".join(ran.json["recommendation"])


def test_plan_reports_useless_ram(kvstore: Kvstore, trace: Path) -> None:
    assert "RAM of 1.0 TiB has all that is ever asked for again" in words(
        kvstore, trace, "--ram", "1TiB"
    )


def test_plan_reports_a_needed_disk(kvstore: Kvstore, trace: Path) -> None:
    text = words(kvstore, trace, "--ram", "64MiB")
    assert "A disk is needed for the rest: one of " in text


def test_plan_reports_a_disk_of_little_use_or_too_slow(kvstore: Kvstore, trace: Path) -> None:
    assert "for hits it is hardly worth it" in words(
        kvstore, trace, "--ram", "4GiB", "--disk", "8GiB"
    )
    slow = words(kvstore, trace, "--ram", "64MiB", "--disk", "8GiB", "--disk-gb-per-s", "0.000001")
    assert "more than the 1e-06 that disks are believed to do" in slow
    assert "All of it should be RAM" in slow


def test_disk_smaller_than_the_ram_is_not_recommended() -> None:
    made = planned_of(ram=1000)
    row = replace(
        made.rows[0], pages=made.nearly_all_pages + 1, hit_rate=0.30, hit_rate_doubled=0.33
    )
    made = replace(made, endless=0.35, wanted_pages=row.pages + 9, ram_asked=True, rows=(row,))
    assert "A disk adds at most 5.0 points." in " ".join(recommendation(made))


def test_policy_is_called_near_optimal_only_if_it_is_at_all_sizes() -> None:
    made = planned_of(ram=1000)
    poor, good = (
        replace(made.rows[0], ram_nbytes=n << 30, hit_rate=h, bound=b)
        for n, h, b in ((1, 0.02, 0.05), (2, 0.86, 0.90))
    )
    text = " ".join(recommendation(replace(made, rows=(poor, good))))
    assert "With RAM of 1.0 GiB the store hits 2.0 %, and an optimal policy 5.0 %" in text
    assert "within 5 %" in " ".join(recommendation(replace(made, rows=(good,))))


def planned_of(ram: int) -> Plan:
    wishes = Wishes(PageSize(512.0, 4096), 1000.0, ram=(ram * 4096,))
    return planned(surveyed(chatting(100), wishes), wishes)


def test_plan_reports_a_trace_without_repetition(kvstore: Kvstore, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1}
    path.write_text(
        "".join(json.dumps({**line, "hash_ids": [2 * i, 2 * i + 1]}) + "\n" for i in range(20))
    )
    assert "no store would save anything" in words(kvstore, path)


def test_plan_without_times_reports_no_rates(kvstore: Kvstore, tmp_path: Path) -> None:
    text = words(
        kvstore,
        written(tmp_path / "still.jsonl", 200, timestamp=0),
        "--ram",
        "64MiB",
        "--disk",
        "1GiB",
    )
    assert "The trace has no times" in text
    assert "GB/s" not in text
