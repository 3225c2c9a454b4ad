"""An engine refused by its store computes as without one: no exception, wait or retry storm."""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gated import TENANT, Gated
from page_pools import PAGES, SOURCE, TARGET, WAIT_S, hashes, pages_at
from waiting import wait_until

from gpu_agent import Agent, AgentConfig, KVPool
from gpu_agent.blocks.backends import ShardPool
from gpu_agent.layouts.vllm import table_pool
from gpu_agent.options import identity_of
from gpu_agent.worker.process_backend import ProcessBackend
from kvstore import Client, ClientConfig, ConfigError, Namespace
from kvstore.security.identities import new_token, revoke


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    gated = Gated(tmp_path)
    yield gated
    assert gated.node.check() == []
    gated.node.stop()


@pytest.fixture
def make_agent(gated: Gated, token_pool: KVPool) -> Iterator[Callable[..., Agent]]:
    made: list[tuple[Agent, Client]] = []
    namespace = Namespace(f"refused {uuid.uuid4()}", token_pool.layout, TENANT)

    def make(**settings: str) -> Agent:
        address = f"127.0.0.1:{gated.node.grpc.port}"
        client = Client(ClientConfig(address, timeout_s=60.0, connect_timeout_s=30.0, **settings))  # type: ignore[arg-type]
        made.append(
            (Agent(client, namespace, token_pool, AgentConfig(staging_nbytes=8192)), client)
        )
        return made[-1][0]

    yield make
    for agent, client in made:
        assert agent.check() == []
        agent.close()
        client.close()


def save(agent: Agent) -> tuple[int, int]:
    """Save the pages and return the numbers of (stored, dropped) pages."""
    result = agent.save(hashes(), SOURCE).done.result(WAIT_S)
    assert bool(result.reason) == bool(result.dropped)
    return result.stored, result.dropped


def load(agent: Agent) -> int:
    return agent.load(hashes(), TARGET).done.result(WAIT_S).pages


def check_all_miss(agent: Agent, pool: KVPool) -> None:
    """Assert that each of many requests is a counted miss, and that nothing is written."""
    before, stats = pages_at(pool, TARGET), agent.stats
    assert [agent.lookup(hashes()) for _ in range(50)] == [0] * 50
    assert (save(agent), load(agent)) == ((0, PAGES), 0)
    assert torch.equal(pages_at(pool, TARGET), before)
    now = agent.stats
    assert now.lookups_failed - stats.lookups_failed == 50
    assert (now.pages_dropped - stats.pages_dropped, now.loads_failed - stats.loads_failed) == (
        PAGES,
        1,
    )


@pytest.mark.parametrize(
    "what", ["unknown", "none", "no file", "open to all", "a pipe", "two words"]
)
def test_refused_token_is_a_miss_without_a_call_each_time(
    gated: Gated,
    make_agent: Callable[..., Agent],
    token_pool: KVPool,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = gated.file(new_token(TENANT) if what != "two words" else "one two")
    if what == "open to all":
        path.chmod(0o644)
    elif what in ("no file", "a pipe"):
        path.unlink()
    if what == "a pipe":
        os.mkfifo(path, 0o600)
    agent = make_agent(**({} if what == "none" else {"token_file": str(path)}))
    with caplog.at_level(logging.INFO):
        began = time.monotonic()
        check_all_miss(agent, token_pool)
        seconds = time.monotonic() - began
    assert gated.knocks <= 8 + 20 * seconds, (
        "the circuit breaker did not pause for longer each time"
    )
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 6
    assert "Traceback" not in caplog.text


def test_token_file_that_appears_later_is_used(
    gated: Gated, make_agent: Callable[..., Agent], token_pool: KVPool
) -> None:
    agent = make_agent(token_file=str(gated.folder / "token"))
    check_all_miss(agent, token_pool)
    gated.file(gated.token("late"))
    wait_until(lambda: save(agent) == (PAGES, 0))
    assert agent.lookup(hashes()) == PAGES
    assert load(agent) == PAGES


@pytest.mark.parametrize("wire", ["shm", "bulk", "grpc"])
def test_revoked_token_is_an_outage(
    gated: Gated, make_agent: Callable[..., Agent], token_pool: KVPool, wire: str
) -> None:
    agent = make_agent(token_file=str(gated.file(gated.token("leaver"))), wire=wire)
    assert save(agent) == (PAGES, 0)
    revoke(gated.path, "leaver")
    gated.taken_up(lambda: not gated.node.access.identities.tokens)
    check_all_miss(agent, token_pool)
    gated.file(gated.token("joiner"))
    wait_until(lambda: agent.lookup(hashes()) == PAGES)
    assert load(agent) == PAGES


def test_revoked_token_is_logged_once_until_a_request_is_served(
    gated: Gated, make_agent: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: "the store answers again" was logged whenever the circuit breaker let a request
    through.
    """
    agent = make_agent(token_file=str(gated.file(gated.token("leaver"))))
    assert save(agent) == (PAGES, 0)
    revoke(gated.path, "leaver")
    gated.taken_up(lambda: not gated.node.access.identities.tokens)
    knocks = gated.knocks
    wait_until(lambda: (agent.lookup(hashes()), gated.knocks >= knocks + 4)[1])
    assert [line for line in caplog.messages if " again" in line or "is back" in line] == []
    assert (
        len([line for line in caplog.messages if line.startswith("the store refuses this engine")])
        == 1
    )
    gated.file(gated.token("joiner"))
    wait_until(lambda: agent.lookup(hashes()) == PAGES)
    assert caplog.messages[-1].startswith("the store serves this engine again")


def test_reader_loads_and_its_saves_are_dropped(
    gated: Gated, make_agent: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    assert save(make_agent(token=gated.token("writer"))) == (PAGES, 0)
    reader = make_agent(token=gated.token("reader", "read"))
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            result = reader.save(hashes(), SOURCE).done.result(WAIT_S)
            assert result.dropped == PAGES or result.existing == PAGES
            assert save_new_pages(reader) == (0, PAGES)
            assert load(reader) == PAGES
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 6


def save_new_pages(agent: Agent) -> tuple[int, int]:
    result = agent.save(hashes(PAGES + 3)[3:], SOURCE).done.result(WAIT_S)
    return result.stored, result.dropped + result.existing


def test_engine_over_its_request_quota_gets_misses(
    gated: Gated, make_agent: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    agent = make_agent(token=gated.token("writer"))
    assert save(agent) == (PAGES, 0)
    with gated.path.open("a") as file:
        file.write(f"tenant {TENANT} requests=1/s\n")
    gated.taken_up(lambda: bool(gated.node.access.identities.quotas))
    with caplog.at_level(logging.INFO):
        failed = [agent.lookup(hashes()) for _ in range(50)]
    assert failed.count(0) > 0, "the engine did not exceed its rate"
    assert set(failed) <= {0, PAGES}
    assert agent.stats.lookups_failed == failed.count(0)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 6


def test_engine_with_a_named_tenant_starts_without_its_token(tmp_path: Path) -> None:
    """The secret may be mounted later; until then everything is a miss."""
    path = tmp_path / "token"
    values = {"model": "m", "token_file": str(path)}
    with pytest.raises(ConfigError, match="can not be read"):
        identity_of(values)
    assert identity_of({**values, "tenant": TENANT}).tenant == TENANT
    path.write_text(new_token("team-b"))
    path.chmod(0o600)
    assert identity_of(values).tenant == "team-b"


def test_agents_process_gets_its_token_but_not_on_its_command_line() -> None:
    token = new_token(TENANT)
    memory = {"layers.0": torch.zeros((4, 2, 16, 8), dtype=torch.uint8)}
    pool = table_pool(memory, 4, 16)
    place = ShardPool(Namespace("m", pool.layout, TENANT), pool)
    waits = [sys.executable, "-c", "import time; time.sleep(60)"]
    home = ProcessBackend(
        [place],
        ClientConfig("127.0.0.1:9", token=token),
        AgentConfig(staging_nbytes=1 << 16),
        waits,
    )
    try:
        assert home.setup()[0]["client"]["token"] == token
        words = Path(f"/proc/{home._child.pid}/cmdline").read_bytes().split(b"\0")
        assert not [word for word in words if token.encode() in word]
    finally:
        home.close()
