"""Write docs/reference from the code: flags, limits and metrics.

python docs/make_reference.py            # writes the files; `make docs` calls it
python docs/make_reference.py --check    # exits with 1 if a file is not current
"""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpu_agent.options import AgentConfig, Identity  # noqa: E402
from kvstore.config import ClientConfig  # noqa: E402
from kvstore.pb import kvstore_pb2 as pb  # noqa: E402
from node.auth.access import Caller  # noqa: E402
from node.config import GROUPS, NodeConfig  # noqa: E402
from node.serving.metrics import NodeCollector  # noqa: E402
from node.serving.reference import BOUNDS, CAPS, SECTIONS, LimitHelp  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
NOTE = "Generated from the code by `make docs`. Do not edit."
SIZES = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def flags() -> str:
    """Return the reference of all settings."""
    fields = {field.name: field for field in dataclasses.fields(NodeConfig)}
    lines = [
        "# Flags and variables",
        NOTE,
        "Every setting has a variable in the environment. A flag overrides its variable. Sizes "
        "take `4GiB` or `4GB`, times are seconds or take `90s`, `30m`, `1h`.",
        "## Node",
        "`--help` prints these. The variable of `--ram-bytes` is `KVSTORE_NODE_RAM_BYTES`.",
    ]
    for group, names in GROUPS.items():
        lines += [f"### {group[0].upper()}{group[1:]}", settings(map(fields.pop, names), flag)]
    secrets = [fields.pop(name) for name in list(fields) if fields[name].metadata.get("secret")]
    lines += [
        "### Expert settings",
        "The help does not list these, because their defaults fit.",
        settings(fields.values(), flag),
        "### Secrets",
        "These have no flag, because other users of a host can read command lines.",
        settings(secrets, lambda name: variable("KVSTORE_NODE", name)),
    ]
    lines += [
        "## Client",
        "Arguments of `ClientConfig`, options of every engine's adapter, and variables.",
        settings(dataclasses.fields(ClientConfig), lambda name: variable("KVSTORE", name)),
        "## Agent",
        "Fields of `AgentConfig`, options of every engine's adapter, and variables.",
        settings(dataclasses.fields(AgentConfig), lambda name: variable("KVSTORE_AGENT", name)),
        "## Identity of pages",
        "Options of every engine's adapter, and variables ([identity](../identity.md)).",
        settings(dataclasses.fields(Identity), lambda name: variable("KVSTORE", name)),
    ]
    return join(lines)


def limits() -> str:
    """Return the reference of all limits."""
    return join(
        [
            "# Limits of a node",
            NOTE,
            "A peer is an IP address (of IPv6 a /64 network), on the shared-memory wire a process, "
            "and at a node with several tenants a tenant. One peer gets half of a cap unless the "
            "table says otherwise, so no peer takes the last of anything. A refused call gets "
            "`RESOURCE_EXHAUSTED` with the name of the resource, its cap and a remedy. A client "
            "does not count it as a failure of the node, and the engine computes.",
            "## Caps",
            limit_table(CAPS),
            "## Of one request, call or connection",
            limit_table(BOUNDS),
        ]
    )


def metrics() -> str:
    """Return the reference of all metrics."""
    lines = [
        "# Metrics of a node",
        NOTE,
        "`GET /metrics` at `--metrics-port`, as Prometheus text or OpenMetrics. A name ends with "
        "its unit. Counters start at 0 with the node. No label has a key, a prompt or an address. "
        "A caller of one tenant sees that tenant only.",
    ]
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in NodeCollector(_service(), Caller("")).collect()
    }
    assert families.keys() == {name for section in SECTIONS.values() for name in section}
    for title, section in SECTIONS.items():
        rows = [
            (
                f"`{name}`",
                families[name].type,
                " ".join(f"`{label}`" for label in families[name]._labelnames),
                text,
            )
            for name, text in section.items()
        ]
        lines += [f"## {title}", table(("metric", "kind", "labels", "meaning"), rows)]
    return join(lines)


def settings(fields: Iterable["dataclasses.Field[Any]"], name_of: Any) -> str:
    """Return a table of settings."""
    rows = []
    for field in fields:
        meta, name = field.metadata, field.name
        if meta.get("choices"):
            span = ", ".join(meta["choices"])
        elif meta.get("low") is not None:
            span = f"{value_of(name, meta['low'])} to {value_of(name, meta['high'])}"
        else:
            span = ""
        default = "" if meta.get("secret") else value_of(name, field.default)
        cells = (f"`{name_of(name)}`", default, span, meta["help"], meta.get("when", ""))
        rows.append(tuple(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells))
    return table(("setting", "default", "range", "meaning", "change it when"), rows)


def limit_table(rows: dict[str, LimitHelp]) -> str:
    """Return a table of limits."""
    return table(
        ("resource", "limit", "beyond it"),
        [(name, row.size, row.beyond) for name, row in rows.items()],
    )


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("nbytes", "bytes").replace("_", "-")


def variable(prefix: str, name: str) -> str:
    """Return the variable of a setting."""
    return f"{prefix}_{name.upper()}".replace("NBYTES", "BYTES")


def value_of(name: str, value: Any) -> str:
    """Return a value with its unit."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    if name.endswith("port"):
        return str(value)
    if "nbytes" in name:
        suffix = "/s" if name.endswith("_per_s") else ""
        for shift, unit in SIZES:
            if value and not value % (1 << shift):
                return f"{value >> shift} {unit}{suffix}"
    return f"{value:,.10g} s" if name.endswith("_s") and "nbytes" not in name else f"{value:,}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def join(parts: Iterable[str]) -> str:
    """Return paragraphs as a text, wrapped at 100 columns."""
    import textwrap

    wrapped = (
        part if part.startswith(("|", "#")) else textwrap.fill(part, 100, break_on_hyphens=False)
        for part in parts
    )
    return "\n\n".join(wrapped) + "\n"


def _service() -> Any:
    """Return a stand-in for a node's service, with every part of a status and no values."""
    status = pb.NodeStatusReply()
    for name in ("ram", "disk", "peers", "shm", "tls"):
        getattr(status, name).SetInParent()
    nothing = SimpleNamespace(
        **dict.fromkeys(("requests", "gets", "errors", "moved", "waiting_gets"), dict)
    )
    return SimpleNamespace(
        call=lambda *_: status,
        peers=SimpleNamespace(channels=SimpleNamespace(failing=dict)),
        traffic=nothing,
        peer_queue=SimpleNamespace(waiting_count=0),
    )


REFERENCE = {"flags.md": flags, "limits.md": limits, "metrics.md": metrics}


def main(words: list[str]) -> int:
    """Write the files, or compare them."""
    stale = []
    for name, make in REFERENCE.items():
        path, text = FOLDER / name, make()
        if "--check" in words:
            stale += [name] if not path.exists() or path.read_text() != text else []
        else:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"not current: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
