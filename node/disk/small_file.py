"""Keep a small file of the data directory up to date, in the background.

    save(content) --> the newest `content` waits --> a thread --> I/O process --> data_dir/NAME

A call of `save` takes microseconds, so it may be made under any lock. The disk is accessed by the
I/O process only: a thread in a hanging disk call could not be killed, and would keep this process
and its ports.
"""

import logging
import threading
from collections.abc import Callable

from node.disk.directory import Directory

log = logging.getLogger(__name__)

INTERVAL_S = 1.0  # between two writes of a file
CLOSE_S = 1.0  # longest wait of `close` for the disk


class SmallFile:
    """A file of at most `data_dir.SMALL_NBYTES_MAX` bytes that is replaced as a whole. Thread-safe.

    A disk that fails, is full or hangs costs only the file's newest content. The next `save` writes
    it again.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._changed = threading.Condition()
        self._content: Callable[[], bytes] | None = None  # not written yet
        self._thread: threading.Thread | None = None
        self._closed = False

    def read(self) -> bytes:
        """Return the file's content. It is empty if there is no file, or it can not be read."""
        try:
            return self._directory.read_file(self._name)
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("%s in the data directory can not be read: %s", self._name, error)
            return b""

    def save(self, content: Callable[[], bytes]) -> None:
        """Replace the file soon; `content` is called by another thread. Never waits."""
        with self._changed:
            if self._closed:
                return
            self._content = content
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the next `save` tries it again
                    log.warning("%s is not written: %s", self._name, error)
                    return
                self._thread = thread

    def close(self) -> None:
        """Write the newest content, if the disk takes it within CLOSE_S."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)

    def _run(self) -> None:
        """Write until the end. Report the first of several failures."""
        has_failed = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._content or self._closed)
                content, self._content = self._content, None
            if content is None:
                return
            try:
                self._directory.replace_file(self._name, content())
                has_failed = False
            except (OSError, MemoryError) as error:
                if not has_failed:
                    log.warning(
                        "%s in the data directory can not be written: %s", self._name, error
                    )
                has_failed = True
            with self._changed:
                self._changed.wait_for(lambda: self._closed, INTERVAL_S)
