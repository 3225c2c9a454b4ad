"""The node that engines with the address `local` start on their host."""

from kvstore import Client
from kvstore.admin import answered


def local_pid() -> int:
    """Return its process. Raises KVStoreError if there is none."""
    with Client("local") as client:
        (status,) = answered(client.statuses()).values()
    return status.pid
