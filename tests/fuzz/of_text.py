"""Text from people and programs: settings, addresses, traces, HTTP request heads."""

import dataclasses
from collections.abc import Callable
from typing import Any

from of_access import TOKEN, guarded
from scripted import Bites, ScriptedSocket, http_reply, scratch
from watched import Target

from kvstore.cli.selection import option_seconds, parse_tokens
from kvstore.config import ClientConfig, load, parse_address, split_address
from kvstore.tools.trace import conversations, read_trace
from kvstore.units import parse_nbytes
from node.cluster.membership import advertised
from node.cluster.registry import endpoints_and_name
from node.config import NodeConfig
from node.serving.metrics import MetricsServer, metrics_text

NODE_FIELDS = dataclasses.fields(NodeConfig)
CLIENT_FIELDS = dataclasses.fields(ClientConfig)


def settings() -> Target:
    """Make a target of environment variables.

    The first byte of an input selects a setting of a node or a client; the rest is its text.
    """

    def once(data: bytes) -> None:
        number, text = (data[0] if data else 0), data[1:].decode(errors="surrogateescape")
        fields: Any = (NODE_FIELDS, CLIENT_FIELDS)[number % 2]
        cls: Any = (NodeConfig, ClientConfig)[number % 2]
        name = fields[number // 2 % len(fields)].name
        variable = f"K_{name.upper()}".replace("NBYTES", "BYTES")
        load(cls, "K", {}, {variable: text})

    def seeds() -> list[bytes]:
        made = [(i * 2, f) for i, f in enumerate(NODE_FIELDS)] + [
            (i * 2 + 1, f) for i, f in enumerate(CLIENT_FIELDS)
        ]
        return [bytes((number,)) + _text(field).encode() for number, field in made]

    return Target(once, seeds, nbytes_max=256)


def _text(field: Any) -> str:
    return f"{field.default >> 20}MiB" if "nbytes" in field.name else str(field.default)


PARSERS: list[tuple[Callable[[str], object], list[bytes]]] = [
    (parse_nbytes, [b"4GiB", b"512MiB", b" 64k", b"1e3", b"1_0", b"1e308t", b"-5b"]),
    (split_address, [b"host:7440", b"host", b"[::1]:7440", b"::1", b":1", b"a:65536"]),
    (
        parse_address,
        [
            b"bulk://host:7441",
            b"bulk://[::1]:1",
            b"unix:/run/x.sock",
            b"unix:///x",
            b"unix:x",
            b"a:1",
        ],
    ),
    (endpoints_and_name, [b"etcd://a:2379,b/fleet", b"etcd://[::1]:2379/f", b"etcd://::1/f"]),
    (
        lambda text: advertised(text, "127.0.0.1", 7440, []),
        [b"host:1", b"host", b"[fd00::1]", b"::1", b"bulk://a:1"],
    ),
    (lambda text: parse_tokens(text, "--tokens"), [b"1, 2 3", b"[1, 2]", b"[[1]]", b"[true]"]),
    (option_seconds, [b"90s", b"1.5h", b"500ms", b"7d"]),
]


def words() -> Target:
    def once(data: bytes) -> None:
        parse, _ = PARSERS[(data[0] if data else 0) % len(PARSERS)]
        try:
            parse(data[1:].decode(errors="surrogateescape"))
        except ValueError:
            if parse is not parse_nbytes:  # the only one documented to raise ValueError
                raise

    def seeds() -> list[bytes]:
        return [
            bytes((number,)) + text for number, (_, texts) in enumerate(PARSERS) for text in texts
        ]

    return Target(once, seeds, nbytes_max=256)


def traces() -> Target:
    path = scratch() / "trace.jsonl"

    def once(data: bytes) -> None:
        path.write_bytes(data)
        for request in read_trace(path, 100):
            assert request.timestamp_ms >= 0
            assert all(0 <= hash_id < 1 << 64 for hash_id in request.hash_ids)

    def seeds() -> list[bytes]:
        line = b'{"timestamp": %d, "input_length": 6955, "output_length": 52, "hash_ids": %s}\n'
        made = [line % (r.timestamp_ms, str(list(r.hash_ids)).encode()) for r in conversations(4)]
        return [b"".join(made), b"\n\n" + made[0], made[1].replace(b"6955", b"Infinity")]

    return Target(once, seeds)


def heads() -> Target:
    """Make a target of HTTP requests to the metrics port of a node with authentication.

    The first byte of an input is the number of bytes that arrive at a time, in units of 64.
    """
    house = guarded()
    choose = metrics_text(house.node.service)
    server = MetricsServer(
        "127.0.0.1",
        0,
        lambda headers, peer: choose(headers, peer)._replace(body=lambda: b"metrics\n"),
        lambda: True,
    )

    class Slow(ScriptedSocket):
        """A scripted socket that delivers at most `step` bytes at a time."""

        step = 1

        def recv(self, nbytes: int, flags: int = 0) -> bytes:
            return super().recv(min(nbytes, self.step), flags)

    def once(data: bytes) -> None:
        bites = Bites(data)
        step = 1 + bites.number(1) * 64
        sock = Slow(bites.take(bites.left))
        sock.step = step
        reply = http_reply(server, sock)
        assert b"200 OK" not in reply or TOKEN.encode() in data, "metrics were sent without a token"

    def seeds() -> list[bytes]:
        bearer = f"Authorization: Bearer {TOKEN}\r\n".encode()
        accept = b"Accept: application/openmetrics-text; version=1.0.0; escaping=allow-utf-8\r\n"
        made = [
            b"GET /metrics HTTP/1.1\r\nHost: a\r\n" + bearer + accept,
            b"GET / HTTP/1.1\r\n" + accept,
            b"HEAD / HTTP/1.0\r\n",
            b"POST / HTTP/1.1\r\n",
            b"\x16\x03",
        ]
        return [b"\xff" + head + b"\r\n" for head in made] + [b"\0" + made[0] + b"\r\n"]

    def close() -> None:
        server.stop()
        house.close()

    return Target(once, seeds, nbytes_max=12 << 10, close=close)


TARGETS = {"settings": settings, "sizes, addresses": words, "traces": traces, "HTTP heads": heads}
