"""The address `local` with SGLang's controller: the first engine of a host starts a node."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "helpers" / "sglang_local.py"


def test_first_engine_starts_a_node_and_the_next_one_hits(host: dict[str, str]) -> None:
    variables = {**os.environ, **host, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for found in (0, 160):
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer == {"found": found, "loaded": 160, "same": True}
