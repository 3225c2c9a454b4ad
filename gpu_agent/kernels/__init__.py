"""The staged pipeline and its CUDA kernels: `gpu_agent.transfer.Transfer` at the speed of the link.

    cuda.py         CudaTransfer: what users make. With host_memory.py the only importers of cupy
    staged.py       the pipeline, behind an interface of a device; simulated.py is a device for tests
    plan.py         a pool as tables; transfer.cu reads them
    batch.py        many copies in one call of the driver
    host_memory.py  page-locking of mapped memory

`TorchTransfer` is the oracle: same arguments, same bytes.
"""
