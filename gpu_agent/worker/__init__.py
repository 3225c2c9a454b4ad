"""Processes beside an engine's on a GPU: its own gives orders and asks, and reads what became of that.

In:  orders (keys, block numbers, an event of the engine's stream), questions, and the engine's tensors, mapped
Out: pages in the node, blocks in the engine's memory, and a line for each: read, stored, loaded, answered

    the engine's side                                 the other side, after `python -m gpu_agent.worker`
    process_backend.py  agents of a rank              agent_worker.py   agents as anywhere else
    lookup_client.py    lookups of a scheduler        lookup_worker.py  threads that ask the store
    worker_process.py   their life: no thread         task.py           what it was started for, and its end

    frames.py      the socket between, and what is said on it
    ipc_memory.py  the engine's tensors in another process, and events of the engine's stream
    choice.py      a process of their own, or threads of the engine's
    probe.py       what an agent on a GPU needs of this host, for `kvstore doctor --gpu`
"""
