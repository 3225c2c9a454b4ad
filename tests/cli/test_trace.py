"""Traces: reading of requests, and messages about invalid lines."""

import json
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore.tools.trace import TraceRequest, count_requests, read_trace, trace_prefix_hash

GOOD = {"timestamp": 5, "input_length": 7, "output_length": 3, "hash_ids": [0, 2**64 - 1]}


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def test_request_is_read_as_written(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD)
    assert list(read_trace(path)) == [TraceRequest(5, 7, 3, (0, 2**64 - 1))]


def test_page_sizes_of_a_recording_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl", {**GOOD, "page_nbytes": 4096, "page_tokens": 2.5, "stored": True}
    )
    assert list(read_trace(path)) == [TraceRequest(5, 7, 3, (0, 2**64 - 1), 4096, 2.5, True)]
    path = write(tmp_path / "trace.jsonl", {**GOOD, "something": "else"})
    assert list(read_trace(path)) == [TraceRequest(5, 7, 3, (0, 2**64 - 1))]


def test_sessions_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", {**GOOD, "session": "a", "ended": True})
    (request,) = read_trace(path)
    assert (request.session, request.ended, request.stored) == ("a", True, False)


def test_blank_lines_are_not_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", "  ", GOOD)
    assert count_requests(path) == len(list(read_trace(path))) == 2


def test_limit_ends_reading_before_an_invalid_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, GOOD, "broken")
    assert len(list(read_trace(path, 2))) == count_requests(path, 2) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object but list"),
        ("[" * 100_000, "not JSON"),
        ({**GOOD, "timestamp": -1}, "timestamp is -1"),
        ({**GOOD, "timestamp": "0"}, "timestamp is '0'"),
        ({**GOOD, "input_length": True}, "input_length is True"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1}, "hash_ids is missing"),
        ({**GOOD, "hash_ids": {}}, "hash_ids is dict"),
        ({**GOOD, "hash_ids": [1, True]}, "hash id True"),
        ({**GOOD, "stored": 1}, "stored is 1"),
        ({**GOOD, "ended": 1}, "ended is 1"),
        ({**GOOD, "session": 1}, "session is 1"),
        ({**GOOD, "session": "x" * 65}, "session is 'xxx"),
        ({**GOOD, "page_tokens": -1}, "page_tokens is -1"),
        ({**GOOD, "page_nbytes": None}, "page_nbytes is None"),
        ({**GOOD, "hash_ids": [1, 2.5]}, "hash id 2.5"),
        ({**GOOD, "hash_ids": [-1]}, "hash id -1"),
        ({**GOOD, "hash_ids": [2**64]}, "hash id 18446744073709551616"),
        ({**GOOD, "hash_ids": [4, 9, 4]}, "names an id twice"),
    ],
)
def test_invalid_line_is_reported_with_its_number_and_fault(
    tmp_path: Path, line: object, message: str
) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", line)
    with pytest.raises(InvalidRequest) as caught:
        list(read_trace(path))
    assert f"{path}, line 3: " in str(caught.value)
    assert message in str(caught.value)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequest, match="line 1: not JSON"):
        list(read_trace(path))


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_unreadable_file_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="can not read trace"):
        list(read_trace(tmp_path / name))


def test_prefix_hash_of_an_id_is_as_documented() -> None:
    # printf 'kvstore-trace\001\0\0\0\0\0\0\0' | sha256sum
    assert (
        trace_prefix_hash(1).hex()
        == "0266adaf454491d503e03aa86d9a97ec3f554a13be786e7edb8f8c2801fefe64"
    )
