"""Processes beside an engine's on a GPU: its own gives orders and asks, and reads what became of that.

In:  orders (keys, block numbers, an event of the engine's stream), questions, and the engine's tensors, mapped
Out: pages in the node, blocks in the engine's memory, and a line for each: read, stored, loaded, answered

    the engine's side                             the other side, after `python -m gpu_agent.worker`
    home.py     agents of a rank                  host.py       agents as anywhere else
      orders.py   what is under way
    asking.py   lookups of a scheduler            answering.py  threads that ask the store
    child.py    their life: no thread, no waiting task.py       what it was started for, and its end

    channel.py  the socket between; frames.py: what is said on it
    memory.py   the engine's tensors in another process; marks.py: what the engine's stream had to do
    choice.py   a process of their own, or threads of the engine's
"""
