"""Who a node is in its cluster, from one life to the next: `member.json` in its data directory.

The token tells a restart of this directory's node from another node that was given the same id.
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.cluster.view import check_name
from kvstore.errors import ConfigError
from kvstore.keys import NAMESPACE_DIGEST_NBYTES
from kvstore.whole_file import write_whole

FILE_NAME = "member.json"
TOKEN_NBYTES = 8
_DIGEST = re.compile(f"[0-9a-f]{{{2 * NAMESPACE_DIGEST_NBYTES}}}")
# How long etcd keeps that a namespace was removed. Who was away for longer may have pages that nobody must see again.
REMOVALS_KEPT_S = 30 * 24 * 3600
AHEAD_S_MAX = 3600.0  # tolerated: a file server, whose clock may be ahead, dates the file
NUMBER_MAX = 1 << 63  # a view's number is etcd's revision plus a base, each below half of this


class Identity:
    """`applied`: number of the newest view of whose removals none is left to do here; `to_erase`: digests of namespaces
    of which that is so, but whose rows and keys are to be erased still. Without a data directory nothing is kept: then
    it is another node after each start. Raises ConfigError."""

    def __init__(self, data_dir: str, cluster: str, member: str) -> None:
        self._path = Path(data_dir) / FILE_NAME if data_dir else None
        known = self._read(cluster)
        self.cluster = cluster
        self.token = str(known.get("token") or secrets.token_hex(TOKEN_NBYTES))
        self.applied = int(known.get("applied") or 0)
        self.to_erase = [bytes.fromhex(text) for text in known.get("to_erase", ())]
        own = str(known.get("member") or "")
        if member and own and member != own:
            raise ConfigError(
                f"member={member}, but data_dir={data_dir} is that of {own}; start it as {own}, or with a data_dir of "
                f"its own, or remove {self._path} if its pages are to be {member}'s"
            )
        if not (member or own or data_dir):
            raise ConfigError("a node without data_dir has no id that lasts; name it with member (--member)")
        self.member = member or own or f"n{self.token}"
        check_name("member", self.member)

    def _read(self, cluster: str) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            known = json.loads(self._path.read_text())
            written_s = self._path.stat().st_mtime
            if not isinstance(known, dict) or not _are_numbers(known) or not _are_digests(known):
                raise ValueError("it is not what a node writes")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self._path} can not be read: {error}; remove it, and name the node's id") from error
        if known.get("cluster") != cluster:
            raise ConfigError(
                f"data_dir belongs to a member of the cluster {known.get('cluster')}, not of {cluster}; give another "
                f"data_dir, or remove {self._path} if its pages are to move"
            )
        # A copy from a backup has a new modification time. The time in the file is the older one, then.
        age_s = time.time() - min(written_s, known.get("saved_s", written_s))
        if age_s > REMOVALS_KEPT_S:
            raise ConfigError(
                f"this node was away for {age_s / 86400:.0f} days, and what was removed is remembered for "
                f"{REMOVALS_KEPT_S // 86400}: it may have pages that were removed meanwhile; empty data_dir"
            )
        if age_s < -AHEAD_S_MAX:
            raise ConfigError(
                f"{self._path} is dated {-age_s / 86400:.1f} days in the future by this host's clock, so it is "
                f"unknown how long this node was away; correct the clock, or empty data_dir if it was ahead then"
            )
        return known

    def save(self, applied: int, to_erase: Sequence[bytes] = ()) -> None:
        """Also says that this node is not away. Raises OSError."""
        self.applied, self.to_erase = applied, list(to_erase)
        if self._path is None:
            return
        known: dict[str, Any] = {"cluster": self.cluster, "member": self.member, "token": self.token}
        known |= {
            "saved_s": int(time.time()),
            "applied": applied,
            "to_erase": [digest.hex() for digest in self.to_erase],
        }
        write_whole(self._path, json.dumps(known).encode(), 0o600)


def _are_numbers(known: dict[str, Any]) -> bool:
    """Return whether `applied` and `saved_s` are in range for a view's number and a time."""
    found = known.get("applied", 0), known.get("saved_s", 0)
    return all(isinstance(number, int) and 0 <= number < NUMBER_MAX for number in found)


def _are_digests(known: dict[str, Any]) -> bool:
    """Whether what is to be erased is named as a node does it."""
    found = known.get("to_erase", [])
    return isinstance(found, list) and all(isinstance(text, str) and _DIGEST.fullmatch(text) for text in found)
