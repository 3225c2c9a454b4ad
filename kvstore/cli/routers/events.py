"""Run `kvstore events`: tell routers what is stored, over ZMQ and HTTP."""

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvstore.cli.exits import ExitCode, Failure
from kvstore.cli.invocation import Invocation
from kvstore.cli.output import deferred_interrupt, emit, note
from kvstore.cli.routers.query import Hash, Seed
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.keys import PREFIX_HASH_NBYTES_MIN
from kvstore.tools.prompts import HASHES, Hashing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.bridge.publisher import Publisher
    from kvstore.client import Client

NONE = "none"
INTERRUPT_S = 0.1
OBJECTS = ("{hash}_0_k", "{hash}_0_v")  # SGLang's, of one rank


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text)


Model = Annotated[str, _option("--model", "NAME", "The model, as its engines name it.")]
Endpoint = Annotated[str, _option("--endpoint", "ADDRESS", "vLLM's events; none: off.")]
Routers = Annotated[
    list[str] | None,
    _option("--router", "ADDRESS", "Where a router listens for vLLM's events; repeat it."),
]
Replay = Annotated[str, _option("--replay", "ADDRESS", "Replay socket of vLLM's events.")]
Mooncake = Annotated[str, _option("--mooncake", "ADDRESS", "Mooncake's events, for Dynamo.")]
Http = Annotated[
    str, _option("--http", "[HOST:]PORT", "Answer queries in the form of Mooncake's Conductor.")
]
Pool = Annotated[str, _option("--pool", "NAME", "The store's name for routers.")]
Hashes = Annotated[str, _option("--hashes", "bytes|low64|sglang", "Form of block hashes.")]
Medium = Annotated[str, _option("--medium", "NAME", "Medium of vLLM's events.")]
_GROUP_HELP = "Name of a block for Dynamo. [default: sglang-hicache: and that of its first object]"
GroupId = Annotated[str, _option("--group-id", "TEXT", _GROUP_HELP)]
_OBJECTS_HELP = f"Objects of a block for Dynamo; repeat it. [default: {', '.join(OBJECTS)}]"
Objects = Annotated[
    list[str] | None, typer.Option("--object-key", metavar="TEXT", help=_OBJECTS_HELP)
]
Refresh = Annotated[
    float,
    typer.Option("--refresh", metavar="SECONDS", help="How often all is sent again; 0: never."),
]


def events(
    run: Invocation,
    model: Model,
    endpoint: Endpoint = "tcp://127.0.0.1:5557",
    routers: Routers = None,
    replay: Replay = NONE,
    mooncake: Mooncake = NONE,
    http: Http = NONE,
    pool: Pool = "kvstore",
    hashes: Hashes = "bytes",
    medium: Medium = "STORAGE",
    objects: Objects = None,
    group: GroupId = "",
    refresh_s: Refresh = 300.0,
    hash_name: Hash = HASHES[0],
    hash_seed: Seed = None,
) -> int:
    """Publish a model's stored blocks to routers, until Ctrl-C.

    SIGTERM ends it, too. Follows the feed of the node, or of all members of a cluster, and
    publishes it over ZMQ: as vLLM's KV events, from a pool that all engines share, and as events of
    Mooncake's store. New subscribers get a snapshot. --http answers /query and /query_by_hash.
    Whoever reaches the sockets may read: they have no passwords. ZMQ needs the extra
    kvstore-llm[events].

    \b
    Examples:
      kvstore events --model llama-3-8b --endpoint none --router tcp://router:5557
      kvstore events --model llama-3-8b --endpoint none --mooncake 'tcp://*:5559'
      kvstore events --model llama-3-8b --endpoint none --http 8090
    """
    signal.signal(signal.SIGTERM, _leave)
    _check_publishers(endpoint, replay, bool(routers) or {mooncake, http} != {NONE})
    if not model:  # the feed would tell of all models
        raise InvalidRequest("--model must not be empty")
    if not refresh_s >= 0:
        raise InvalidRequest("--refresh must be a number that is not negative")
    hashing = Hashing(hash_name, hash_seed)
    hashing.check()
    report = _Reporter(run.as_json)
    with deferred_interrupt() as safe_point, run.client() as client:
        if http != NONE:
            _serve(client, http, pool, hashing, report)
        if endpoint == mooncake == NONE and not routers:
            _check_node(client, model, report)
            while True:
                safe_point()
                time.sleep(INTERRUPT_S)
        bridge, publisher, wires = _with_zmq()

        def make(new_context: Any) -> "Sequence[Publisher]":
            made, context = [], new_context()
            if endpoint != NONE:
                wire = wires.VllmWire(pool, model, hashes, medium)
                also = "" if replay == NONE else publisher.check_endpoint(replay)
                at = publisher.check_endpoint(endpoint)
                made.append(publisher.Publisher(context, wire, at, also, refresh_s))
            for router in dict.fromkeys(routers or ()):  # twice, it would see gaps in its stream
                wire = wires.VllmWire(pool, model, hashes, medium)
                at, own = publisher.check_endpoint(router, connect=True), new_context()
                made.append(publisher.Publisher(own, wire, at, "", refresh_s, connect=True))
            if mooncake != NONE:
                wire = wires.MooncakeWire(pool, model, client.tenant, objects or OBJECTS, group)
                at = publisher.check_endpoint(mooncake)
                made.append(publisher.Publisher(context, wire, at, "", refresh_s))
            return made

        bridge.publish(client, model, client.tenant, make, report, safe_point)
    return ExitCode.OK


def _check_publishers(endpoint: str, replay: str, has_others: bool) -> None:
    if endpoint == NONE and not has_others:
        raise InvalidRequest("nothing to publish: give --endpoint, --router, --mooncake or --http")
    if endpoint == NONE != replay:
        raise InvalidRequest("--replay needs --endpoint: it repeats what that published")


def _serve(client: "Client", listen: str, pool: str, hashing: Hashing, report: "_Reporter") -> None:
    from kvstore.bridge.http import Queries, QueryServer

    address = QueryServer(listen, Queries(client, client.tenant, pool, hashing)).start()
    report("listening", addresses=[f"http://{address}"])


def _check_node(client: "Client", model: str, report: "_Reporter") -> None:
    """Say if the node does not answer. Raises what a later query would, such as of a wrong token.

    Without a feed nothing else would tell.
    """
    try:
        client.query(model, [bytes(PREFIX_HASH_NBYTES_MIN)])
    except (Unavailable, DeadlineExceeded) as error:
        report("away", text=str(error))


def _with_zmq() -> tuple[Any, Any, Any]:
    """Return the modules that need the extra. Raises Failure without it."""
    try:
        from kvstore.bridge import bridge, publisher, wires
    except ModuleNotFoundError as error:
        if error.name not in ("zmq", "msgpack"):
            raise
        raise Failure(
            f"{error.name} is missing: pip install 'kvstore-llm[events]'", ExitCode.USAGE
        ) from error
    return bridge, publisher, wires


def _leave(number: int, frame: object) -> NoReturn:
    """End at once: nothing is to be saved, and Python ignores exceptions in some callbacks."""
    os._exit(ExitCode.OK)


class _Reporter:
    """Tells operators what happens: JSON on stdout, or a line on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(
        self, kind: str, addresses: "Sequence[str]" = (), blocks: int = 0, text: str = ""
    ) -> None:
        if self._as_json:
            value = {"kind": kind, "addresses": list(addresses), "blocks": blocks, "text": text}
            emit(value)
            sys.stdout.flush()
            return
        note(
            {
                "listening": f"listening at {', '.join(addresses)}",
                "ready": f"ready: {blocks:,} blocks are stored",
                "away": f"the node does not answer: {text}",
                "back": f"the node answers again: {blocks:,} blocks are stored",
            }[kind]
        )
