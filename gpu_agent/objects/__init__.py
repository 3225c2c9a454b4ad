"""Store bytes by name, for an engine that has no pool of KV for the agent.

    store          objects: whole buffers, each of its own size (LMCache)
    tensors        tensors of any size, as chunks of one size (vLLM's encoder outputs): saves
    tensor_loads   the same: loads, complete before the engine counts on them
    parts          how a call of many objects is split and put together again

put, get, exists, remove --> parts (one namespace each) --> bounded threads --> client
"""
