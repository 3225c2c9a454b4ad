"""Concurrent calls that share a gateway's connections, with fake contexts in place of gRPC.

Many are cancelled at random moments, and the node refuses, closes connections, and sends more than
sockets buffer. Each call gets its own reply, or none.
"""

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from scripted_node import Plan, ScriptedNode, framed

from kvstore.pb import kvstore_pb2 as pb
from node.gateway.server import NodeState, Servicer

CALLS = int(os.environ.get("KVSTORE_STORM_EVENTS") or 300)
ABREAST = 12
PAUSE_S_MAX = 0.004
ENDED = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
OPS = ("get", "put", "lookup")


class Context:
    """A fake gRPC context of a call by the caller of a plan."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._plan, self._rng = plan, rng
        self.written: list[Any] = []
        self.first = asyncio.Event()
        self.code: Any = None
        self.details = ""

    def peer(self) -> str:
        return f"ipv4:{self._plan.caller}"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    async def write(self, message: bytes) -> None:
        await pause(self._rng)
        self.written.append(bytes(message))
        self.first.set()


async def pause(rng: random.Random) -> None:
    if rng.random() < 0.5:
        await asyncio.sleep(rng.random() * PAUSE_S_MAX)


class Storm:
    def __init__(self, servicer: Servicer, seed: int) -> None:
        self.servicer = servicer
        self._rng = random.Random(seed)
        methods = servicer.handlers()[0]
        self._methods = {
            op: methods.service(_Details(f"/kvstore.KVStore/{op.capitalize()}")) for op in OPS
        }
        self.done: Counter[str] = Counter()

    async def run(self, numbers: "list[int]", cancels: bool) -> None:
        while numbers:
            await self._one(Plan(numbers.pop()), cancels)

    async def _one(self, plan: Plan, cancels: bool) -> None:
        rng = self._rng
        op, context = rng.choice(OPS), Context(plan, rng)
        call = asyncio.ensure_future(self._called(op, plan, context))
        if cancels and rng.random() < 0.4:
            await asyncio.sleep(
                rng.choice((0.0, rng.random() * PAUSE_S_MAX, rng.random() * 10 * PAUSE_S_MAX))
            )
            call.cancel()
            await asyncio.wait([call])
            if call.cancelled():
                self.done["cancelled"] += 1
                return
        reply = await call
        if context.code is None:
            self._check(op, plan, context, reply)
            self.done[op] += 1
        else:
            assert plan.fault or cancels, (
                f"call {plan.number} was refused: {context.code} {context.details}"
            )
            assert context.code in ENDED, f"{context.code} {context.details}"
            if context.code is grpc.StatusCode.NOT_FOUND:
                assert context.details == plan.name.decode()
            self.done["refused"] += 1

    async def _called(self, op: str, plan: Plan, context: Context) -> Any:
        request = {"get": pb.GetRequest, "put": pb.PutRequest, "lookup": pb.LookupRequest}[op](
            namespace=plan.name
        )
        if op == "lookup":
            return await self._methods[op].unary_unary(request.SerializeToString(), context)
        messages = self._pages(plan, context) if op == "put" else _only(request.SerializeToString())
        return await self._methods[op].stream_stream(messages, context)

    async def _pages(self, plan: Plan, context: Context) -> AsyncIterator[bytes]:
        begin = pb.PutRequest(
            namespace=plan.name, prefix_hashes=[plan.name], page_nbytes=plan.nbytes
        )
        yield pb.PutFrame(begin=begin).SerializeToString()
        await context.first.wait()
        page, at = plan.page, 0
        step = self._rng.choice((len(page), 1 + len(page) // 3, 300_000))
        while at < len(page):
            await pause(self._rng)
            yield pb.PutFrame(chunk=pb.PageChunk(data=page[at : at + step])).SerializeToString()
            at += step
        yield pb.PutFrame(commit=pb.CommitRequest(leaves=[plan.name])).SerializeToString()

    def _check(self, op: str, plan: Plan, context: Context, reply: Any) -> None:
        assert not (plan.fault and not plan.late), (
            f"call {plan.number} got a reply, but the node refused it"
        )
        if op == "lookup":
            assert reply == plan.said
        elif op == "get":
            first, *frames = context.written
            assert list(pb.GetFrame.FromString(first).begin.checksums) == [plan.said]
            assert b"".join(frames) == (b"" if plan.miss else framed(plan.page))
        else:
            replies = [pb.PutFrameReply.FromString(one) for one in context.written]
            assert list(replies[0].begin.verdicts) == [pb.EXISTS if plan.miss else pb.WRITE]
            assert [one.commit.stored for one in replies[1:]] == (
                [] if plan.miss else [plan.number]
            )


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


async def _only(message: bytes) -> AsyncIterator[bytes]:
    yield message


def test_each_concurrent_call_gets_its_own_reply(seed: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node = ScriptedNode(theirs)

    async def run() -> Counter[str]:
        servicer = Servicer(ours, NodeState(), 8 * ABREAST, 60.0)
        storm = Storm(servicer, seed)
        numbers = list(range(CALLS))
        await asyncio.gather(*(storm.run(numbers, True) for _ in range(ABREAST)))
        assert min(storm.done[what] for what in (*OPS, "cancelled", "refused")) > 0
        await asyncio.sleep(0)
        assert servicer.call_count == 0
        upstream = servicer.upstream
        assert upstream.count == len(upstream._idle)
        assert len({connection._sock.fileno() for connection in upstream._idle}) == upstream.count
        upstream.close()
        return storm.done

    with ours:
        ours.setblocking(False)
        done = asyncio.run(run())
    node.join()
    theirs.close()
    assert node.wrong == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors, done
