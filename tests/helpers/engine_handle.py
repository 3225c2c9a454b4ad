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
    """One vLLM engine."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        ranks = arguments.get("tensor_parallel_size", 1)
        # Not bound: several engines share the machine's cores.
        bound = (
            "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
            if ranks > 1
            else "nobind"
        )
        # One thread: tiny models gain nothing from more, and the engines of a file share the cores.
        more = environment(VLLM_CPU_OMP_THREADS_BIND=bound, OMP_NUM_THREADS="1")
        super().__init__(name, HERE / "engine_process.py", arguments, more)

    def reset(self, connector: bool = False) -> None:
        self.settle()
        assert self.ask("reset", connector=connector)["done"], "blocks are still held"

    def settle(self) -> dict[str, Any]:
        """Until the saves of finished requests have ended."""
        found = self.ask("settle")
        assert found["idle"], f"{self._name} still has something to do: {found}"
        assert found["blocks_held"] == 0, f"{self._name} leaks blocks: {found}"
        return found

    def chain(self, whole: Sequence[int]) -> list[bytes]:
        """Names of the pages of a prompt's full blocks."""
        return [bytes.fromhex(name) for name in self.ask("chain", prompt=list(whole))["hashes"]]

    def arm(self, at: str, do: str, **fault: Any) -> None:
        """See engine_faults.py."""
        time.sleep(0.1)  # what the last request left to do in other threads is no occasion
        self.ask("arm", faults=[{"at": at, "do": do, **fault}])

    def struck(self) -> list[str]:
        """Faults that happened since the last question, in all processes of the engine."""
        return [fault for process in self.ask("report")["processes"] for fault in process["struck"]]

    def calls(self) -> dict[str, int]:
        """Calls of the store since the last question, by moment, in all processes of the engine."""
        total: dict[str, int] = {}
        for process in self.ask("report")["processes"]:
            for at, count in process["calls"].items():
                total[at] = total.get(at, 0) + count
        return total
