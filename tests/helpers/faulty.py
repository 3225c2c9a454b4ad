"""Our SGLang adapters with the faults of engine_faults.py.

SGLang loads this module instead of the real adapters in its scheduler's process. Each fault is read
from a file, which is deleted once the fault is armed.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import engine_faults

from gpu_agent.engines import sglang, sglang_linker

POLL_S = 0.005


def listen() -> None:
    engine_faults.install()
    threading.Thread(
        target=_arm_all, args=(Path(os.environ["KVSTORE_TEST_FAULTS"]),), daemon=True
    ).start()


def _arm_all(path: Path) -> None:
    while True:
        if path.exists():
            engine_faults.arm(**json.loads(path.read_text()))
            path.unlink()
        time.sleep(POLL_S)


class KVStoreHiCache(sglang.KVStoreHiCache):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        listen()
        super().__init__(*arguments, **options)


class KVStoreLinker(sglang_linker.KVStoreLinker):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        listen()
        super().__init__(*arguments, **options)
