"""The current public interfaces: Python names, settings, commands, messages and metrics.

Each list consists of nested dictionaries of plain values, so that `broken.broken` can compare it
with a recorded one.
"""

import ast
import dataclasses
import enum
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from google.protobuf import descriptor_pb2

import gpu_agent
import kvstore
from gpu_agent.options import AgentConfig, Identity
from kvstore import errors, results
from kvstore.cli.commands import build
from kvstore.cli.exits import ExitCode, code_of
from kvstore.config import ClientConfig
from kvstore.pb import kvstore_pb2 as pb
from node.auth.access import THE_NODE
from node.config import NodeConfig
from node.main import _parser
from node.serving.metrics import NodeCollector
from node.serving.request_metrics import RequestMetrics

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "gpu_agent" / "engines"
# Adapter classes that users name in engine settings, see docs/engines. Engines are not installed
# here, so the files are parsed.
ADAPTERS = {
    "lightllm": ("PyLocalCacheService", "PyState"),
    "lmcache": ("NodeAdapter", "NodeConnector"),
    "sglang": ("KVStoreHiCache",),
    "sglang_linker": ("KVStoreLinker",),
    "transformers": ("TransformersAdapter",),
    "transformers_paged": ("PagedAdapter",),
    "vllm": ("KVStoreConnector",),
    "vllm_tier": ("KVStoreTier", "KVStoreOffloadingConnector"),
}

Tree = dict[str, Any]


# ---- Python ----------------------------------------------------------------------------------


def python() -> Tree:
    found = {f"kvstore.{name}": _described(getattr(kvstore, name)) for name in kvstore.__all__}
    found |= {
        f"gpu_agent.{name}": _described(getattr(gpu_agent, name)) for name in gpu_agent.__all__
    }
    found |= {
        f"kvstore.results.{kind.__name__}": _described(kind)
        for kind in (results.ClientStats, results.VerifyResult)
    }
    found |= {
        f"gpu_agent.engines.{file}.{name}": "class" for file in ADAPTERS for name in _classes(file)
    }
    return found


def _classes(file: str) -> list[str]:
    """Return the adapter classes that exist in a file."""
    tree = ast.parse((ENGINES / f"{file}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ADAPTERS[file]
    ]


def _described(thing: Any) -> Any:
    if not callable(thing):
        return "type"
    if not inspect.isclass(thing):
        return {"parameters": _parameters(thing, skip=0)}
    if issubclass(thing, Exception):
        return {
            "is": {
                base.__name__: True
                for base in thing.__mro__[1:]
                if issubclass(base, errors.KVStoreError)
            }
        }
    if issubclass(thing, enum.Enum):
        return {"members": {member.name: member.value for member in thing}}
    names = [name for name in dir(thing) if not name.startswith("_")]
    names += (
        [field.name for field in dataclasses.fields(thing)]
        if dataclasses.is_dataclass(thing)
        else []
    )
    members = {name: _member(inspect.getattr_static(thing, name, None)) for name in names}
    return {"parameters": _parameters(thing, skip=0), "members": members}


def _member(thing: Any) -> Any:
    if isinstance(thing, staticmethod | classmethod):
        return {"parameters": _parameters(thing.__func__, skip=int(isinstance(thing, classmethod)))}
    return {"parameters": _parameters(thing, skip=1)} if inspect.isfunction(thing) else "attribute"


def _parameters(call: Any, skip: int) -> Tree:
    """Return parameters; `place` is the position of those that may be positional, else -1."""
    found = list(inspect.signature(call).parameters.values())[skip:]
    places = {
        some.name: number for number, some in enumerate(found) if some.kind is not some.KEYWORD_ONLY
    }
    return {
        some.name: {
            "place": places.get(some.name, -1),
            "optional": some.default is not some.empty
            or some.kind in (some.VAR_KEYWORD, some.VAR_POSITIONAL),
        }
        for some in found
    }


# ---- settings and commands -------------------------------------------------------------------


def settings() -> Tree:
    kinds = {"KVSTORE_NODE": NodeConfig, "KVSTORE": ClientConfig, "KVSTORE_AGENT": AgentConfig}
    found = {kind.__name__: _fields(prefix, kind) for prefix, kind in kinds.items()}
    return {**found, Identity.__name__: _fields("KVSTORE", Identity)}


def _fields(prefix: str, kind: Any) -> Tree:
    return {
        field.name: {
            "variable": f"{prefix}_{field.name.upper()}".replace("NBYTES", "BYTES"),
            "type": type(field.default).__name__,
            "low": field.metadata.get("low"),
            "high": field.metadata.get("high"),
            "choices": dict.fromkeys(field.metadata.get("choices") or (), True),
        }
        for field in dataclasses.fields(kind)
    }


def commands() -> Tree:
    node = {
        flag: {"optional": True, "takes": action.nargs == 0}
        for action in _parser()._actions
        for flag in action.option_strings
    }
    leaves = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.KVStoreError)
    ]
    return {
        "kvstore": _command(typer.main.get_command(build())),
        "kvstore-node": {"parameters": node},
        "exit statuses": {code.name: int(code) for code in ExitCode},
        "exit statuses of errors": {kind.__name__: int(code_of(kind(""))) for kind in leaves},
    }


def _command(command: Any) -> Tree:
    found: Tree = {}
    for place, parameter in enumerate(command.params):
        optional = not parameter.required
        if parameter.param_type_name == "argument":
            found[f"<{parameter.name}>"] = {"place": place, "optional": optional}
        else:
            about = {"flag": bool(getattr(parameter, "is_flag", False)), "optional": optional}
            found |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], about)
    inner = getattr(command, "commands", {})
    return {
        "parameters": found,
        "commands": {name: _command(some) for name, some in sorted(inner.items())},
    }


# ---- messages and metrics --------------------------------------------------------------------


def messages() -> Tree:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    types = {
        number: name.removeprefix("TYPE_").lower()
        for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
    }
    repeated = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    found: Tree = {}
    for message in file.message_type:
        found[message.name] = {}
        for field in message.field:
            prefix = "repeated " * (field.label == repeated)
            kind = field.type_name[1:] or types[field.type]
            found[message.name][str(field.number)] = f"{prefix}{kind} {field.name}"
    for values in file.enum_type:
        found[values.name] = {str(value.number): value.name for value in values.value}
    for service in file.service:
        for method in service.method:
            streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
            signature = (
                f"{streams[0]}{method.input_type[1:]} -> {streams[1]}{method.output_type[1:]}"
            )
            found.setdefault(f"{file.package}.{service.name}", {})[method.name] = signature
    return found


def metrics() -> Tree:
    """Return the metrics of a node with all optional parts."""
    status = pb.NodeStatusReply(
        ram=pb.RamStatus(), disk=pb.DiskStatus(), peers=pb.PeersStatus(), shm=pb.ShmStatus()
    )
    status.tenants.add(tenant="t")
    status.namespaces.add(digest=b"d")
    status.gateways.add(name="gateway-0")
    status.gateway_ends.add(why="memory")
    status.tls.certificates.add(setting="tls_cert")
    traffic = RequestMetrics()
    traffic.count_put("bulk", 1)
    traffic.count_get("ram", "bulk", 1, 0)
    traffic.of_wire("bulk").answered("get", 0)
    traffic.of_wire("bulk").failed("get", errors.Exhausted(""))
    peers = SimpleNamespace(channels=SimpleNamespace(failing=lambda: {"n1": False}))
    queue = SimpleNamespace(waiting_count=0)
    service: Any = SimpleNamespace(
        call=lambda *_: status, traffic=traffic, peers=peers, peer_queue=queue
    )
    found: Tree = {}
    for family in NodeCollector(service, THE_NODE).collect():
        assert family.samples, family.name
        for sample in family.samples:
            found[sample.name] = {"type": family.type, "labels": " ".join(sorted(sample.labels))}
    return found


LISTS = {
    "python": python,
    "settings": settings,
    "commands": commands,
    "messages": messages,
    "metrics": metrics,
}
