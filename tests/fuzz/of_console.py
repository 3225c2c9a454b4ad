"""What browsers send to the console of a node that asks who you are."""

from typing import Any

from inside import KEYS, OTHERS, SECRET, SPACE, STORED
from of_access import TOKEN, guarded
from watched import Target

from kvstore.errors import KVStoreError
from node.console.exchange import OWN_HEADER, Refused, Watch, Work, parse
from node.serve.metrics_server import Asker

ASKER = Asker("127.0.0.1", ())


def console() -> Target:
    """Of a reader: what is another tenant's is never told, strangers are told nothing, and nothing changes."""
    house = guarded()

    def once(data: bytes) -> None:
        served = house.node.console
        assert served is not None
        try:
            request = parse(data)
            answer = None if request is None else served.respond(request, ASKER)
            if isinstance(answer, Work):
                answer = answer.do(lambda: False)
            elif isinstance(answer, Watch):
                answer = answer.begin()
        except (Refused, KVStoreError):
            return
        if answer is None:
            return
        assert isinstance(answer, bytes)
        assert OTHERS.digest.hex().encode() not in answer, "told of another tenant"
        assert SECRET[:64] not in answer, "a page of another tenant"
        told = b"default-src" not in answer or b"application/" in answer
        assert not told or TOKEN.encode() in data, "told to a stranger"
        assert house.node.tier.visible_count == 2 * STORED, "pages came or went"

    return Target(once, seeds, check=house.check, close=house.close)


def seeds() -> list[bytes]:
    key, ours, others = KEYS[0].hex(), SPACE.digest.hex(), OTHERS.digest.hex()
    part = '"offset":0,"nbytes":64'
    bodies: list[tuple[str, str]] = [
        ("events", ""),
        *(("look-up", f'{{"namespace":"{space}","key":"{key}"}}') for space in (ours, others)),
        ("look-up", f'{{"namespace":"{ours}","key":"{key[:9]}"}}'),
        *(("bytes", f'{{"namespace":"{space}","key":"{key}",{part}}}') for space in (ours, others)),
        *(("act", f'{{"act":"{act}","namespace":"{others}","key":"{key}"}}') for act in ("remove", "flush", "scrub")),
    ]
    made = [_asked(f"/console/{path}", body) for path, body in bodies]
    return [*made, *(head.replace(TOKEN.encode(), b"x") for head in made), b"GET /console/ HTTP/1.1\r\nHost: a\r\n\r\n"]


def _asked(path: str, body: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Authorization: Bearer {TOKEN}",
        f"{OWN_HEADER}: 1",
        f"Content-Length: {len(body)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


TARGETS: dict[str, Any] = {"console requests": console}
