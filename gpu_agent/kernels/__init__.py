"""Move pages by CUDA kernels and the copy engine, at the speed of the link.

    cuda.py         CudaTransfer: what users make. With host_memory.py the only importers of cupy
    staged.py       StagedTransfer: chunks of a job, and the work on each
    pipeline.py     the order of that work on the GPU
    device.py       the interface to a GPU; simulated.py implements it for tests
    plan.py         a pool as tables; transfer.cu reads them
    host_memory.py  page-locking of mapped memory, and many copies in one call of the driver
    arena_lock.py   page-locking of the node's arena in the background
    interrupts.py   signal handling around NVRTC
    available.py    which transfer serves a device

`TorchTransfer` is the oracle: same arguments, same bytes.
"""
