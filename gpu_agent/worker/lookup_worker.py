"""Make lookups for an engine's scheduler: the worker process of `lookup_client.py`.

SETUP ---> a client, the namespaces opened ---> READY          ADD: one namespace more
ASK, TOUCH ---> threads, one lookup per namespace ---> ANSWER           HINT ---> one thread
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gpu_agent.blocks.lookups import Question, ThreadLookups
from gpu_agent.hint_sender import HintedPages
from gpu_agent.worker import frames
from gpu_agent.worker.frames import AgentsEnd, Kind
from kvstore.client import Client
from kvstore.config import ClientConfig
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.keys import Namespace
from kvstore.messages import parse_namespace
from kvstore.tracing import unpacked_all, within
from kvstore.transports.status import status_code

_OVER_S = 0.001  # for a lookup that comes too late
_OPEN_S = 5.0


class LookupWorker:
    """Answer an engine's questions until it ends."""

    def __init__(self, channel: AgentsEnd, setup: Mapping[str, Any]) -> None:
        try:
            self._client = Client(ClientConfig(**setup["client"]))
            named = [{"namespace": text} for text in setup["namespaces"]]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not a setup: {error!r}") from error
        self._channel = channel
        self._lookups = ThreadLookups(self._client)
        self._namespaces: list[Namespace] = []
        for facts in named:
            self._add(facts)
        channel.send(frames.ready_frame(time.monotonic()))

    def run(self) -> None:
        """Serve until CLOSE.

        Raises ConnectionError when the engine is gone, ProtocolError for a wrong frame.
        """
        while True:
            kind, body = self._channel.receive()
            if kind in (Kind.ASK, Kind.TOUCH):
                self._ask(kind, frames.parse_question(body))
            elif kind is Kind.HINT:
                asked = frames.parse_hint(body)
                pages = self._named(asked.groups)
                hinted = HintedPages(asked.hints, pages, asked.tokens, asked.began, asked.over)
                self._lookups.hint(hinted, asked.after_s)
            elif kind is Kind.ADD:
                self._add(frames.parse_facts(body))
            elif kind is Kind.CLOSE:
                return
            else:
                raise ProtocolError(f"the engine sent {kind.name}")

    def _add(self, facts: Mapping[str, Any]) -> None:
        try:
            self._namespaces.append(parse_namespace(bytes.fromhex(facts["namespace"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"no namespace: {error!r}") from error
        # So that the first request need not wait for it
        self._lookups.open(self._namespaces[-1:], _OPEN_S)

    def _ask(self, kind: Kind, asked: frames.Question) -> None:
        question = self._named(asked.groups)
        left_s = max(_OVER_S, asked.until - time.monotonic())
        with within(unpacked_all(asked.trace)):
            done = (self._lookups.look_up if kind is Kind.ASK else self._lookups.touch)(
                question, left_s
            )
        done.add_done_callback(partial(self._answer, asked.number))

    def _named(self, groups: Sequence[tuple[Sequence[int], Sequence[bytes]]]) -> Question:
        try:
            return [
                ([self._namespaces[number] for number in numbers], keys) for numbers, keys in groups
            ]
        except IndexError as error:
            raise ProtocolError("a question about a namespace that was not named") from error

    def _answer(self, number: int, done: Any) -> None:
        error = done.exception()
        if isinstance(error, KVStoreError):
            answer = frames.Answer(number, status_code(error), str(error), ())
        else:
            answer = frames.Answer(number, 0, None, done.result() or ())
        self._channel.send(frames.answer_frame(answer))
