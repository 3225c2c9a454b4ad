"""Requests of browsers to the console of a node with authentication."""

from typing import Any

from inside import KEYS, OTHERS, SECRET, SPACE, STORED
from of_access import TOKEN, guarded
from scripted import ScriptedSocket, http_reply
from watched import Target

from node.console.console import OWN_HEADER
from node.serving.http_server import HttpServer


def console() -> Target:
    """Make a target of HTTP requests to the console.

    A reader never gets another tenant's data, callers without a token get no data, and no page
    changes.
    """
    house = guarded()

    served = house.node.console
    assert served is not None
    server = HttpServer("127.0.0.1", 0, served.respond)

    def once(data: bytes) -> None:
        answer = http_reply(server, ScriptedSocket(data))
        # A refusal may name the namespace of the request
        ok = answer.startswith(b"HTTP/1.1 200 ")
        assert not ok or OTHERS.digest.hex().encode() not in answer, (
            "a reply names another tenant's namespace"
        )
        assert SECRET[:64] not in answer, "a page of another tenant"
        has_data = ok and (b"application/" in answer or b"event-stream" in answer)
        assert not has_data or TOKEN.encode() in data, "data was sent without a token"
        assert house.node.tier.visible_count == 2 * STORED, "a page was stored or removed"

    def close() -> None:
        server.stop()
        house.close()

    return Target(once, seeds, check=house.check, close=close)


def seeds() -> list[bytes]:
    key, ours, others = KEYS[0].hex(), SPACE.digest.hex(), OTHERS.digest.hex()
    part = '"offset":0,"nbytes":64'
    bodies: list[tuple[str, str]] = [
        ("events", ""),
        *(("look-up", f'{{"namespace":"{space}","key":"{key}"}}') for space in (ours, others)),
        ("look-up", f'{{"namespace":"{ours}","key":"{key[:9]}"}}'),
        *(("look-up", f'{{"namespace":"{space}"}}') for space in (ours, others)),
        *(("bytes", f'{{"namespace":"{space}","key":"{key}",{part}}}') for space in (ours, others)),
        *(
            ("act", f'{{"act":"{act}","namespace":"{others}","key":"{key}"}}')
            for act in ("remove", "flush", "scrub")
        ),
    ]
    made = [_asked(f"/console/{path}", body) for path, body in bodies]
    return [
        *made,
        *(head.replace(TOKEN.encode(), b"x") for head in made),
        b"GET /console/ HTTP/1.1\r\nHost: a\r\n\r\n",
    ]


def _asked(path: str, body: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Authorization: Bearer {TOKEN}",
        f"{OWN_HEADER}: 1",
        f"Content-Length: {len(body)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


TARGETS: dict[str, Any] = {"console requests": console}
