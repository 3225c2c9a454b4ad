"""View the KV tensors of each engine as a `KVPool` (docs/layouts.md).

There is one small function per kind of pool. No engine is imported here.

    lightllm.py  sglang.py  vllm.py  --- group.py: what they have in common --- ../pool.py

Shapes, dtypes and strides are read from the tensors. Tensors on torch's meta device work as well:
then `.layout` is enough for a process without the memory (a scheduler's namespace, a size
estimate).
"""
