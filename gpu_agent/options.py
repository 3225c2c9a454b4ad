"""Parse an engine's options for the store, and build namespaces from an adapter's facts.

    {"address": "store:7440", "tenant": "team-a", "revision": "2026-11-01", "lookup_timeout_s": 0.5}

Every adapter takes the same flat mapping: the fields of `Identity`, of `ClientConfig`, of
`AgentConfig`, and its own. Missing values come from the environment (KVSTORE_*, KVSTORE_AGENT_*),
then from the adapter's defaults, then from ours.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvstore.config import (
    CLIENT_VARIABLES,
    LOCAL,
    UNIX_SCHEME,
    ClientConfig,
    PageKeyConfig,
    check_settings,
    in_environment,
    load,
    local_file,
    reads_environment,
    setting,
    variables_of,
    warn_unknown_variables,
)
from kvstore.errors import ConfigError
from kvstore.keys import TEXT_NBYTES_MAX, Namespace, part_of
from kvstore.layout import PageLayout
from kvstore.page_hmac import page_keys
from kvstore.security.secrets import DEFAULT_TENANT, tenant_of


@reads_environment("KVSTORE_AGENT")
@dataclass(frozen=True)
class AgentConfig:
    """Limits of one agent's saves and loads, which run apart from each other.

    What is not given comes from the environment: KVSTORE_AGENT_WORKERS, ...
    Memory held from the start: 2 x workers x staging_nbytes (saves and loads), 128 MiB by default.
    """

    workers: int = setting(2, "threads for saves, and as many for loads", 1, 64)
    staging_nbytes: int = setting(
        32 << 20, "page buffer of one thread; at least one page", 4096, 4 << 30
    )
    hashers: int = setting(
        0,
        "threads for checksums of pages in a node's mapped memory; 0: half of the CPUs, 2 to 16",
        0,
        256,
    )
    pending_nbytes_max: int = setting(
        2 << 30,
        "page bytes of unfinished saves, and of unfinished loads; more are refused",
        4096,
        1 << 40,
    )
    lookup_timeout_s: float = setting(1.0, "deadline of a lookup", 0.001, 60.0)
    save_timeout_s: float = setting(
        20.0, "deadline of a save, with its wait for a thread", 0.001, 600.0
    )
    load_timeout_s: float = setting(
        10.0, "deadline of a load, with its wait for a thread", 0.001, 600.0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.hashers:
            object.__setattr__(self, "hashers", min(max(2, (os.cpu_count() or 2) // 2), 16))
        if self.pending_nbytes_max < self.staging_nbytes:
            raise ConfigError(
                f"pending_nbytes_max={self.pending_nbytes_max} is smaller than "
                f"staging_nbytes={self.staging_nbytes}: a job of one buffer would never be accepted"
            )


def agent_config(**values: Any) -> AgentConfig:
    """Build an AgentConfig; values may be text, and None counts as not given."""
    return load(AgentConfig, "KVSTORE_AGENT", values)


@dataclass(frozen=True)
class Identity(PageKeyConfig):
    """Tenant and weights of the pages, and the key that signs them.

    Environment: KVSTORE_TENANT, KVSTORE_MODEL, ...
    """

    tenant: str = setting(DEFAULT_TENANT, "tenant of the pages; a token has its own")
    model: str = setting(
        "",
        "name of the weights; empty: the engine's name",
    )
    revision: str = setting("", "version of the weights, such as a commit or a date")
    salt: str = setting("", "anything else that pages depend on")
    epoch: int = setting(
        0, "number to raise after a weight update under one name and revision", 0, (1 << 63) - 1
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @cached_property
    def key_id(self) -> str:
        """Return the id of the key for HMACs, if one is set. Raises ConfigError."""
        keys = page_keys(self)
        return keys.key_id if keys else ""

    def part(self, common: str, group: int, groups: int, ranks: int = 0) -> str:
        """Return a namespace's part; `common` are the facts of all of them (`part_of`)."""
        return part_of(f"{common} salt={self.salt}", group, groups, ranks)

    def namespace(self, layout: PageLayout, facts: str, part: str = "", **shard: int) -> Namespace:
        """Return a shard's namespace (`tp_rank`, `tp_size`, ...); `facts` are of `facts_text`.

        `part`: of `part`, for an engine whose groups or ranks differ in their facts.
        """
        own = f" salt={self.salt}" if self.salt else ""
        return Namespace(
            model=self.model,
            layout=layout,
            tenant=self.tenant,
            revision=self.revision,
            salt=facts + own,
            epoch=self.epoch,
            key_id=self.key_id,
            part=part,
            **shard,
        )


@dataclass(frozen=True)
class Options:
    """An engine's options for the store; `own` are the adapter's own options that were given."""

    identity: Identity
    client: ClientConfig
    agent: AgentConfig
    own: Mapping[str, Any]
    found: str = ""  # where the address was found

    @property
    def store(self) -> str:
        """Return the store's address, with where it was found and what it means, for the log."""
        local = LOCAL in self.client.addresses
        what = f", {UNIX_SCHEME}{local_file('sock')}" if local else ""
        return f"{self.client.address} ({self.found}{what})"


def read_options(
    values: Mapping[str, Any], own: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Options:
    """Parse options; `defaults` are the adapter's. The address `local` begins to have a node.

    Raises ConfigError naming an unknown option, or a value's range.
    """
    kinds = (Identity, ClientConfig, AgentConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)} | set(own)
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r} for the store; known are {', '.join(sorted(known))}"
        )
    secrets = {
        field.name for field in dataclasses.fields(ClientConfig) if field.metadata.get("secret")
    }
    for name in sorted(secrets & set(values)):
        raise ConfigError(
            f"{name} is a secret, and everybody on the host can read an engine's arguments; set "
            f"KVSTORE_{name.upper()}"
        )
    known_variables = CLIENT_VARIABLES | variables_of(AgentConfig, "KVSTORE_AGENT")
    warn_unknown_variables(known_variables, "KVSTORE_AGENT_")
    client = load(ClientConfig, "KVSTORE", values, defaults=defaults)
    options = Options(
        identity_of(values),
        client,
        load(AgentConfig, "KVSTORE_AGENT", values, defaults=defaults),
        {name: values[name] for name in own if name in values},
        _found(values),
    )
    keep_local(client)
    return options


def _found(values: Mapping[str, Any]) -> str:
    if values.get("address") is not None:
        return "option address"
    if "address" in in_environment(ClientConfig, "KVSTORE"):
        return "KVSTORE_ADDRESS"
    return "default: a node on this host"


def keep_local(client: ClientConfig) -> None:
    """Have a node on this host if the address asks for it."""
    if LOCAL in client.addresses:
        from kvstore.tools import local_node  # seldom needed

        local_node.keep()


def identity_of(values: Mapping[str, Any]) -> Identity:
    """Return the identity that options name.

    Raises ConfigError, also for an unreadable token that should name the tenant.
    """
    identity = load(Identity, "KVSTORE", values, defaults={"tenant": ""})
    if identity.tenant:
        return identity
    client = load(
        ClientConfig,
        "KVSTORE",
        {name: values.get(name) for name in ("tenant", "token", "token_file")},
    )
    return dataclasses.replace(identity, tenant=tenant_of(client))


def _one_word(fact: Any) -> str:
    """Quote a fact that would look like two facts, or like a fact and the salt."""
    text = str(fact)
    return json.dumps(text) if any(mark in text for mark in ' "\n') else text


def facts_text(engine: str, **facts: Any) -> str:
    """Format facts for a namespace's salt: `"vllm backend=FLASH_ATTN kv_dtype=fp8"`.

    It is readable, so that `kvstore ls` shows why two engines do not share. A long text ends in a
    digest.
    """
    text = " ".join([engine, *(f"{name}={_one_word(facts[name])}" for name in sorted(facts))])
    room = TEXT_NBYTES_MAX // 2
    if len(text.encode()) <= room:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return f"{text.encode()[: room - 40].decode(errors='ignore')} sha256={digest}"
