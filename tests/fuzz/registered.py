"""All targets. A module `of_*.py` of this folder has some in TARGETS, and is named here."""

import of_client
import of_cluster
import of_disk
import of_frames
import of_grpc
import of_text
from watched import Target

MODULES = (of_frames, of_grpc, of_client, of_disk, of_cluster, of_text)
MADE = [make for module in MODULES for make in module.TARGETS]


def targets() -> dict[str, Target]:
    return {target.name: target for target in (make() for make in MADE)}
