"""Which models run which cases, on which engines; and the run itself."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cases
from comparison import ROUNDING
from configuration import Store, StoreFailed
from engine_control import Engine, EngineDied, EngineRefused, Spawner, make_model
from outcomes import Outcome, outcome_of
from session import MANY, Session, Skip

DEATHS_MAX = 3
# Which cases a model runs: all but those that need a model of their own; those of one engine; few.
SPECIAL = ("adapters", "media", "other rank count")
WHOLE = tuple(name for name in cases.CASES if name not in SPECIAL)
ONE_ENGINE = WHOLE[: WHOLE.index("another process") + 1]
SHORT = ("control", "sensitivity", "full hit", "partial hit", "boundaries", "another process")


@dataclass(frozen=True)
class Model:
    """A tiny model and how engines run it. `cpu`, `gpu`: vLLM's arguments by device.

    `gpu_only`: why vLLM on a CPU does not run it.
    """

    kind: str
    cases: tuple[str, ...]
    dtype: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    gpu_only: str = ""


OWN = "own model"
STATES_ON_CPU = "vLLM's CPU mixers fail with prefix caching (tried: 0.32)"
STATES: dict[str, Any] = {
    "block_size": None,
    "max_num_batched_tokens": 512,
    "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer may not be installed
}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
MODELS: dict[str, Model] = {
    "llama": Model("llama", WHOLE),
    "sliding": Model("sliding", ONE_ENGINE),
    "mla": Model("mla", SHORT, dtype="bfloat16", gpu={"block_size": 64}),
    "fp8": Model("llama", SHORT, dtype="bfloat16", arguments={"kv_cache_dtype": "fp8"}),
    "mamba2": Model("mamba2", ONE_ENGINE, arguments=STATES, gpu_only=STATES_ON_CPU),
    "gated-delta": Model("gated-delta", ONE_ENGINE, arguments=STATES, gpu_only=STATES_ON_CPU),
    "lora": Model("llama", ("control", "adapters"), arguments=LORA),
    "sound": Model("sound", ("control", "media"), arguments={"skip_tokenizer_init": False}),
    OWN: Model("", WHOLE),
    "two ranks": Model("llama", ("control", "other rank count"), ranks=2),
    # With two KV heads: each is on two ranks
    "four ranks": Model("llama", ("control", "other rank count"), ranks=4),
}
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 512,
}
# Engines share the device, so none may size its cache by the free memory.
ON_CPU: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20}
ON_GPU: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.03}
SEVERAL_RANKS: dict[str, Any] = {"distributed_executor_backend": "mp"}


class Runner:
    """Runs cases. `own`: more arguments of vLLM, for a model that is not one of the tiny ones."""

    def __init__(
        self,
        spawner: Spawner,
        store: Store,
        models: Sequence[str],
        chosen: Sequence[str],
        own: dict[str, Any] | None = None,
    ) -> None:
        self._spawner = spawner
        self._store = store
        self._models = models
        self._chosen = chosen
        self._own = own or {}
        self._count = 0

    def run(self) -> Iterator[Outcome]:
        """Yield the outcome of each case, as it ends."""
        for name in self._models:
            model = MODELS[name]
            wanted = [case for case in model.cases if case in self._chosen]
            if not wanted:
                continue
            why = self.lacks(model)
            session = None
            try:
                if not why:
                    session = self.session(name, roles_of(wanted))
                    assert session.plain.facts
            except (EngineRefused, EngineDied) as error:
                why = f"the engine does not run this model: {error}"
            if why or session is None:
                yield from (Outcome(name, case, "skipped", details=(why,)) for case in wanted)
                continue
            try:
                yield from self._cases(name, session, wanted)
            finally:
                session.close()

    def lacks(self, model: Model) -> str:
        """Return why this machine does not run a model, or nothing."""
        facts = self._spawner.facts
        if facts["device"] == "cpu":
            return model.gpu_only
        if model.ranks > facts["gpus"]:
            return f"needs {model.ranks} GPUs"
        return ""

    def session(self, name: str, roles: Sequence[str]) -> Session:
        """Start the engines of a model, side by side: one without a connector, and these roles."""
        model = MODELS[name]
        self._store.used_for = f"{name}, the start of engines"
        dtype = self.dtype(model)
        arguments = self.arguments(model)
        adapters = self.adapters(dtype) if arguments.get("enable_lora") else []

        def start(role: str) -> Engine:
            self._count += 1
            given = dict(arguments)
            if role == MANY:
                given |= SEVERAL_RANKS | {"tensor_parallel_size": model.ranks}
            environment = {}
            if role != "plain":
                given["kv_transfer_config"] = self._store.kv_transfer_config
                environment = self._store.environment
            if role == MANY and self._spawner.facts["device"] == "cpu":
                cores = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(model.ranks))
                environment = {**environment, "VLLM_CPU_OMP_THREADS_BIND": cores}
            label = f"{name} {role} {self._count}"
            return Engine(self._spawner, label, given, environment)

        return Session(
            name, start, self._store, ROUNDING.get(dtype, max(ROUNDING.values())), adapters, roles
        )

    def dtype(self, model: Model) -> str:
        on_cpu = self._spawner.facts["device"] == "cpu"
        dtype: str = self._own.get("dtype", model.dtype)
        return dtype or ("float32" if on_cpu else "bfloat16")

    def arguments(self, model: Model) -> dict[str, Any]:
        """Return vLLM's arguments; makes the model if needed. Raises EngineRefused."""
        dtype = self.dtype(model)
        on_cpu = self._spawner.facts["device"] == "cpu"
        device = {**ON_CPU, **model.cpu} if on_cpu else {**ON_GPU, **model.gpu}
        found = {**COMMON, "dtype": dtype, **device, **model.arguments}
        found |= self._own
        if "model" not in found:
            found["model"] = self._made(model.kind, dtype)
        return {name: value for name, value in found.items() if value is not None}

    def adapters(self, dtype: str) -> list[str]:
        return [self._made(f"adapter-{number}", dtype) for number in (1, 2)]

    def _made(self, kind: str, dtype: str) -> str:
        path = self._spawner.folder / f"{kind}-{dtype}"
        if not path.exists():
            make_model(self._spawner, kind, path, dtype)
        return str(path)

    def _cases(self, name: str, session: Session, wanted: Sequence[str]) -> Iterator[Outcome]:
        deaths, refused = 0, ""
        for case in wanted:
            if case not in cases.CONTROLS:
                if refused:
                    yield Outcome(name, case, "did not start", details=(refused,))
                    continue
                if deaths == DEATHS_MAX:
                    why = f"the engine died {deaths} times before"
                    yield Outcome(name, case, "skipped", details=(why,))
                    continue
            found, refused = run_case(name, case, session)
            deaths += found.outcome == "engine died"
            yield found


def roles_of(wanted: Sequence[str]) -> list[str]:
    """Return the engines to start with the first one, so that they start side by side."""
    roles = ["writer"] if set(wanted) - set(cases.CONTROLS) else []
    return [*roles, "reader"] if "another process" in wanted else roles


def run_case(name: str, case: str, session: Session) -> tuple[Outcome, str]:
    """Run a case; return its outcome and, if the engine refused the connector, why."""
    start = time.monotonic()
    session.store.used_for = f"{name}, {case}"
    checks = session.begin()
    try:
        cases.run(case, session)
    except Skip as skip:
        if not checks.wrong:
            return Outcome(name, case, "skipped", details=(str(skip),)), ""
    except EngineRefused as error:
        return Outcome(name, case, "did not start", details=(str(error),)), str(error)
    except EngineDied as error:
        session.drop_all()
        if not checks.wrong:
            details = (str(error),)
            return Outcome(name, case, "engine died", compared=checks.compared, details=details), ""
        checks.notes.append(f"engine died: {error}")
    except StoreFailed as error:
        session.drop_all()
        return Outcome(name, case, "engine died", details=(f"the store: {error}",)), ""
    return outcome_of(name, case, checks, time.monotonic() - start), ""
