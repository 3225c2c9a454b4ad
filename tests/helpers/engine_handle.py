"""The tests' side of engine_process.py."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_apart import EngineApart
from vllm_server import environment

HERE = Path(__file__).parent


class EngineHandle(EngineApart):
    """One vLLM engine. `variables`: further ones of its environment."""

    def __init__(self, name: str, arguments: dict[str, Any], **variables: str) -> None:
        ranks = arguments.get("tensor_parallel_size", 1)
        # A single rank is not bound to a core: several engines share the machine's cores.
        bound = (
            "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
            if ranks > 1
            else "nobind"
        )
        # One thread: tiny models gain nothing from more, and engines share the cores.
        usual = {"VLLM_CPU_OMP_THREADS_BIND": bound, "OMP_NUM_THREADS": "1"}
        more = environment(**usual, **variables)
        super().__init__(name, HERE / "engine_process.py", arguments, more)

    def reset(self, connector: bool = False) -> None:
        self.settle()
        assert self.ask("reset", connector=connector)["done"], "blocks are still held"

    def settle(self) -> dict[str, Any]:
        """Wait until the saves of finished requests have ended, then check for leaked blocks."""
        found = self.ask("settle")
        assert found["idle"], f"{self._name} is not idle: {found}"
        assert found["blocks_held"] == 0, f"{self._name} leaks blocks: {found}"
        return found

    def chain(self, whole: Sequence[int]) -> list[bytes]:
        """Return the hashes of the pages of a prompt's full blocks."""
        return [bytes.fromhex(name) for name in self.ask("chain", prompt=list(whole))["hashes"]]

    def arm(self, at: str, do: str, **fault: Any) -> None:
        """Arm a fault of engine_faults.py."""
        time.sleep(0.1)  # let the last request's work in other threads finish first
        self.ask("arm", faults=[{"at": at, "do": do, **fault}])

    def struck(self) -> list[str]:
        """Return the faults that struck since the last report, in all processes of the engine."""
        return [fault for process in self.ask("report")["processes"] for fault in process["struck"]]

    def calls(self) -> dict[str, int]:
        """Return the calls of the store by moment since the last report, in all processes."""
        total: dict[str, int] = {}
        for process in self.ask("report")["processes"]:
            for at, count in process["calls"].items():
                total[at] = total.get(at, 0) + count
        return total
