"""CUDA transfer: the place of the `.cu` files and of their typed launcher.

The launcher implements `gpu_agent.transfer.Transfer` like `TorchTransfer`, which is its oracle:
same arguments, same bytes. It is the only code of this project that imports cupy.
"""
