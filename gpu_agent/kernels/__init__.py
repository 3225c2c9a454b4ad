"""Move pages by CUDA kernels and the copy engine, at the speed of the link.

    cuda.py         CudaTransfer: what users make. With host_memory.py the only importers of cupy
    staged.py       StagedTransfer: chunks of a job, and what each does
    pipeline.py     the order of that work on the GPU
    device.py       what both need of a GPU; simulated.py is one for tests
    plan.py         a pool as tables; transfer.cu reads them
    batch.py        many copies in one call of the driver
    host_memory.py  page-locking of mapped memory; arena_lock.py: of which, and until when
    available.py    which transfer serves a device

`TorchTransfer` is the oracle: same arguments, same bytes.
"""
