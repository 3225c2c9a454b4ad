"""Files that may change while the node runs: looked at once a second."""

import logging
import threading
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

EVERY_S = 1.0


class Watch:
    """A thread that calls each of `looks`; one that breaks harms no other."""

    def __init__(self, looks: Sequence[Callable[[], None]]) -> None:
        self._looks = looks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_S):
            for look in self._looks:
                try:
                    look()
                except Exception:
                    log.exception("a file could not be looked at")
