"""A call in a gateway, with gRPC's part played: what it is told when it must go."""

import asyncio
import socket
from typing import Any

import grpc

from node.gateway.call import Call
from node.gateway.server import NodeState, Servicer

LATER_S = 0.2


class Context:
    """The answer takes a while to be taken."""

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
    """A call that has no time left when it answers."""

    async def answers(call: Call, messages: Any) -> None:
        call.limit(0.0, "it had no time")
        await call.write(b"answer")
        raise AssertionError("it goes on")

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


def test_a_call_that_must_go_while_its_answer_is_on_its_way_is_told_behind_it() -> None:
    """gRPC takes no status before: without it the caller waited for its own deadline."""
    context = Context(LATER_S)
    served(context, stall_s=60.0)
    assert context.written == [b"answer"]
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.details == "the call was ended: it had no time"


def test_an_answer_that_is_not_taken_ends_the_call_without_a_status() -> None:
    context = Context(60.0)
    try:
        served(context, stall_s=LATER_S)
    except asyncio.CancelledError:
        pass
    assert (context.written, context.code) == ([], None)
