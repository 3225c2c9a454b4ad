"""The engines' layouts (docs/layouts.md): one small function per kind of pool, from the engine's
own tensors to a `KVPool`. No engine is imported here.

lightllm.py  sglang.py  vllm.py  --- group.py: what they have in common --- ../pool.py

Shapes, dtypes and strides are read from the tensors. Tensors on torch's meta device do as well:
then `.layout` is what a process without the memory needs (a scheduler's namespace, a size
estimate).
"""
