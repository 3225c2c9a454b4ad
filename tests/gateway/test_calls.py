"""The status of a call that its gateway ends, with a fake context in place of gRPC."""

import asyncio
import socket
from typing import Any

import grpc

from node.gateway.call import Call
from node.gateway.server import NodeState, Servicer

LATER_S = 0.2


class Context:
    """A gRPC context whose client takes `taken_s` seconds to read a reply."""

    def __init__(self, taken_s: float) -> None:
        self._taken_s = taken_s
        self.written: list[bytes] = []
        self.code: Any = None
        self.details = ""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:7"

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(self._taken_s)
        self.written.append(message)


def served(context: Context, stall_s: float) -> None:
    """Serve a call that has no time left when it replies."""

    async def answers(call: Call, messages: Any) -> None:
        call.limit(0.0, "it had no time")
        await call.write(b"answer")
        raise AssertionError("the call was not ended")

    async def nothing() -> Any:
        return
        yield

    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            servicer = Servicer(ours, NodeState(), 4, stall_s)
            await servicer._handler(answers, servicer._calls).stream_stream(nothing(), context)
            assert not servicer.call_count

    asyncio.run(run())


def test_call_ended_during_its_reply_gets_a_status_after_it() -> None:
    """A call that ends while its reply is being sent gets its status after the reply.

    gRPC accepts no status before that. Regression: the caller waited for its own deadline.
    """
    context = Context(LATER_S)
    served(context, stall_s=60.0)
    assert context.written == [b"answer"]
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.details == "the call was ended: it had no time"


def test_unread_reply_ends_the_call_without_a_status() -> None:
    context = Context(60.0)
    try:
        served(context, stall_s=LATER_S)
    except asyncio.CancelledError:
        pass
    assert (context.written, context.code) == ([], None)
