"""Ctrl-C at a safe point.

KeyboardInterrupt may surface between any two bytecodes. Inside gRPC's Python code that can leave one
of its locks held, and closing the channel then never returns (seen with grpcio 1.85). So while a long
command runs, the first Ctrl-C only takes effect where the command says it may.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvstore.errors import KVStoreError


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Gives the body a function that raises KeyboardInterrupt if Ctrl-C was pressed since.

    A second Ctrl-C does what it always does, at once.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not ours there
        yield lambda: None
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    def safe_point() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield safe_point
    except KVStoreError:
        safe_point()  # a node that we started got the Ctrl-C as well: not its loss is the news
        raise
    finally:
        signal.signal(signal.SIGINT, before)
