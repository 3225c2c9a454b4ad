"""Handwritten HTTP requests to a node's console."""

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from waiting import wait_until

from node.console.console import OWN_HEADER, Console
from node.console.history import History
from node.server import Node

OWN = {OWN_HEADER: "1"}


def console_of(node: Node) -> Console:
    assert node.console is not None
    return node.console


def history_of(node: Node) -> History:
    (history,) = [
        one
        for look in node._watch._looks
        if isinstance(one := getattr(look, "__self__", None), History)
    ]
    return history


@pytest.fixture
def nothing_is_left_at_the_console(node: Node) -> Iterator[None]:
    yield
    console, metrics = console_of(node), node.metrics
    assert metrics is not None
    budgets = (console.watchers, console.calls, console.reads)
    wait_until(
        lambda: (
            not (
                metrics._threads or any(budget.used for budget in budgets) or metrics._limiter.count
            )
        )
    )


def connection(node: Node, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    port = node.service.metrics_port
    if tls is not None:
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=30.0, context=tls)
    return http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)


def visit(
    node: Node, path: str, values: Any = None, token: str = "", method: str = "", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Return (status, headers, body) of a request.

    With `values` it is a POST as the console's page makes it.
    """
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        asked["Authorization"] = f"Bearer {token}"
    body = None
    if values is not None:
        asked = {**OWN, **asked}
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
    there = connection(node)
    try:
        there.request(method or ("GET" if values is None else "POST"), path, body, asked)
        reply = there.getresponse()
        return reply.status, reply.msg, reply.read()
    finally:
        there.close()


def told(node: Node, path: str, values: Any, token: str = "") -> tuple[int, dict[str, Any]]:
    status, _, body = visit(node, path, values, token)
    return status, json.loads(body)


@contextmanager
def watching(node: Node, token: str = "") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Yield an iterator over the console's events: (name, data)."""
    there = connection(node)
    there.request(
        "POST",
        "/console/events",
        b"{}",
        {**OWN, **({"Authorization": f"Bearer {token}"} if token else {})},
    )
    reply = there.getresponse()
    assert reply.status == 200, (reply.status, reply.read())
    try:
        yield events(reply)
    finally:
        reply.close()
        there.close()


def events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    while line := reply.readline():
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def first(node: Node, token: str = "") -> dict[str, Any]:
    with watching(node, token) as found:
        return next(found)[1]
