"""Run agents and lookups in processes beside an engine on a GPU.

The engine's process sends orders and lookups, and reads the answers:

    in     orders (keys, block numbers, an event of the engine's stream), lookups, tensors
    out    pages in the node, blocks in the engine's memory, and a frame for each result

    the engine's process                             the worker: `python -m gpu_agent.worker`
    process_backend.py  agents of a rank             agent_worker.py   the same agents
    lookup_client.py    lookups of a scheduler       lookup_worker.py  threads that call the store
    worker_process.py   start, supervision, restart  __main__.py       its task, and its end

    frames.py      the frames between them, and the socket
    ipc_memory.py  the engine's tensors and stream events in another process
    choice.py      processes, or threads of the engine's process
    probe.py       what `kvstore doctor --gpu` checks
"""
