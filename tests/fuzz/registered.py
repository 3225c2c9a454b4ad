"""All targets by name, collected from TARGETS of each module `of_*.py` of this folder."""

from collections.abc import Callable

import of_access
import of_client
import of_cluster
import of_console
import of_disk
import of_frames
import of_gateway
import of_grpc
import of_text
from watched import Target

MODULES = (
    of_frames,
    of_grpc,
    of_gateway,
    of_access,
    of_client,
    of_disk,
    of_cluster,
    of_console,
    of_text,
)
TARGETS: dict[str, Callable[[], Target]] = {
    name: make for module in MODULES for name, make in module.TARGETS.items()
}
