"""An asyncio client with the names, arguments and results of `kvstore.Client`.

from kvstore.aio import Client

async with Client("store:7440") as client:
hits = await client.get(namespace, hashes, buffers)
"""

from kvstore.aio.client import Client

__all__ = ["Client"]
