"""SGLang's controller in its own process, with the address `local`, stores a prompt and loads it.

Prints {"found": tokens that the store had at first, "loaded": tokens, "same": whether they are
the bytes that every such process stores}.
"""

import json
import time

import torch
from harness import PAGE, WAIT_S, Engine, fill, mha, options, page_bytes, parallel

TOKENS = list(range(10 * PAGE))
SLOTS = torch.arange(len(TOKENS))
OTHERS = SLOTS + 512


def main() -> None:
    rank = parallel()
    rank.__enter__()
    engine = Engine([mha()], options("local", revision="local"))
    torch.manual_seed(1)
    fill(engine.host)
    expected = page_bytes(engine.host, SLOTS)
    found, end = engine.query(TOKENS).storage_hit_count, time.monotonic() + WAIT_S
    # The node starts beside the engine, and what comes before it is ready is not saved
    while not found and engine.backup(TOKENS, SLOTS).completed_tokens < len(TOKENS):
        assert time.monotonic() < end, "there is no node"
        time.sleep(0.1)
    loaded, _ = engine.fetch(engine.query(TOKENS), OTHERS)
    same = page_bytes(engine.host, OTHERS) == expected
    engine.detach()
    print(json.dumps({"found": found, "loaded": loaded, "same": same}))


if __name__ == "__main__":
    main()
