"""Remember which pages each session has named, within bounds.

A session owns a page if it named it, no other session did, and the page was stored after the
session began. So what a session deletes at its end is its own: shared prefixes stay. A page that is
not in RAM when it is named is owned by nobody.

Records are bounded in number. A tenant that needs more than its half loses the record of its oldest
session, and only that: the pages stay, and are evicted as any others.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

SESSIONS_MAX = 16_384
PAGES_MAX = 131_072  # about 200 bytes each

Key = tuple[bytes, bytes]  # namespace digest, name of the session


@dataclass(slots=True)
class _Session:
    tenant: str
    began_ms: int
    # In order, head first; shared ones too, so that no other session owns them
    pages: dict[bytes, None] = field(default_factory=dict)
    has_ended: bool = False  # it is remembered for its shared pages only


class _Tenant:
    def __init__(self) -> None:
        self.sessions: OrderedDict[Key, _Session] = OrderedDict()  # the longest unused first
        self.page_count = 0


def _used(tenant: _Tenant, pages: bool) -> int:
    return tenant.page_count if pages else len(tenant.sessions)


class SessionPages:
    """The sessions' records. Thread-safe."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, pages_max: int = PAGES_MAX) -> None:
        self._sessions_max = sessions_max
        self._pages_max = pages_max
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._owners: dict[Key, bytes] = {}  # (digest, prefix hash): its session; empty: several
        self.session_count = 0
        self.forgotten_count = 0

    @property
    def page_count(self) -> int:
        """Return how many pages are remembered."""
        return len(self._owners)

    def name(
        self,
        tenant: str,
        digest: bytes,
        session: bytes,
        began_ms: int,
        prefix_hashes: Sequence[bytes],
        stored_ms: Sequence[int | None],
    ) -> None:
        """Note that a session uses pages, which were stored then; a known session began earlier."""
        with self._lock:
            there = self._tenants.setdefault(tenant, _Tenant())
            key = (digest, session)
            record = there.sessions.get(key)
            if record is None:
                self._make_room(tenant, there, pages=False)
                record = there.sessions[key] = _Session(tenant, began_ms)
                self._tenants[tenant] = there
                self.session_count += 1
            elif record.has_ended:
                record.began_ms, record.has_ended = began_ms, False
            there.sessions.move_to_end(key)
            for prefix_hash, stored in zip(prefix_hashes, stored_ms, strict=True):
                page = (digest, prefix_hash)
                owner = self._owners.get(page)
                if owner is not None:
                    if owner != session:
                        self._owners[page] = b""
                elif stored is not None:
                    self._make_room(tenant, there, pages=True)
                    if key not in there.sessions:  # it was the oldest itself: more than its share
                        return
                    record.pages[prefix_hash] = None
                    # Others use what is older than the session; no other session owns it, either
                    self._owners[page] = session if stored >= record.began_ms else b""
                    there.page_count += 1

    def owns(self, digest: bytes, session: bytes, prefix_hash: bytes) -> bool:
        """Return whether the page is a session's own; without a session, whether no one's is it."""
        owner = self._owners.get((digest, prefix_hash))
        return owner is None if not session else owner == session

    def take(
        self, tenant: str, digest: bytes, session: bytes, count: int
    ) -> tuple[list[bytes], bool]:
        """Take some pages of a session's own; the session has ended when none are left.

        Return them, and whether there are more. Shared pages stay known as such: otherwise the next
        session that names them would own them, while others use them.
        """
        with self._lock:
            there, key = self._tenants.get(tenant), (digest, session)
            record = there.sessions.get(key) if there is not None else None
            if there is None or record is None:
                return [], False
            own = [each for each in reversed(record.pages) if self._owners[digest, each] == session]
            taken, more = own[:count], len(own) > count
            for prefix_hash in taken:
                del record.pages[prefix_hash], self._owners[digest, prefix_hash]
            there.page_count -= len(taken)
            record.has_ended = not more
            if not record.pages:
                self._forget(tenant, there, key)
            return taken, more

    def drop(self, tenant: str) -> None:
        """Forget all sessions of a tenant."""
        with self._lock:
            there = self._tenants.get(tenant)
            while there is not None and there.sessions:
                self._forget(tenant, there, next(iter(there.sessions)))

    def _make_room(self, tenant: str, asking: _Tenant, pages: bool) -> None:
        """Forget old sessions until there is room for one more, or for one more page (`pages`)."""
        while True:
            if pages:
                most, total = self._pages_max, len(self._owners)
            else:
                most, total = self._sessions_max, self.session_count
            whose, goes = tenant, asking
            if _used(asking, pages) < -(-most // 2):
                if total < most:
                    return
                whose, goes = max(self._tenants.items(), key=lambda each: _used(each[1], pages))
            oldest = next(iter(goes.sessions))
            self.forgotten_count += not goes.sessions[oldest].has_ended
            self._forget(whose, goes, oldest)

    def _forget(self, tenant: str, there: _Tenant, key: Key) -> None:
        record = there.sessions.pop(key)
        for prefix_hash in record.pages:
            del self._owners[key[0], prefix_hash]
        there.page_count -= len(record.pages)
        self.session_count -= 1
        if not there.sessions:
            self._tenants.pop(tenant, None)

    def check(self) -> list[str]:
        """Return violations of what must always hold; empty if all is well."""
        with self._lock:
            named = {
                (digest, prefix_hash)
                for tenant in self._tenants.values()
                for (digest, _), record in tenant.sessions.items()
                for prefix_hash in record.pages
            }
            wrong = [] if named == self._owners.keys() else ["owners and sessions differ"]
            for name, tenant in self._tenants.items():
                counted = sum(len(record.pages) for record in tenant.sessions.values())
                if counted != tenant.page_count or not tenant.sessions:
                    wrong.append(f"tenant {name} has {counted} pages, counted {tenant.page_count}")
            sessions = sum(len(tenant.sessions) for tenant in self._tenants.values())
            if sessions != self.session_count or sessions > self._sessions_max:
                wrong.append(f"{sessions} sessions, counted {self.session_count}")
            if len(self._owners) > self._pages_max:
                wrong.append(f"{len(self._owners)} pages of sessions")
            return wrong
