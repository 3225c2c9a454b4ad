"""Serve /metrics, /health and the console on one HTTP port.

Scrapes are answered from one text, made anew when it is older than ten times what making it took.
So the node spends no more than a tenth of one core on it, however often clients scrape. /health
tells what gRPC's health service tells, to everybody: a kubelet has no token.
"""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from kvstore.errors import Unavailable
from node.serving.http_server import Asker, HttpServer, Request, Respond, Response, text
from node.tls import Certificates

_AGE_FACTOR = 10
_CACHED_MAX = 64
HEALTH_PATH = "/health"
CONSOLE_PATH = "/console"


class Answer(NamedTuple):
    """A text of metrics.

    All clients of one `scope` get the same.
    """

    content_type: str
    scope: Hashable
    body: Callable[[], bytes]


# From the headers of a request, and who sent it. It and the body raise KVStoreError.
Choose = Callable[[Mapping[str, str], Asker], Answer]


class MetricsServer(HttpServer):
    """Serves from the constructor on."""

    def __init__(
        self,
        host: str,
        port: int,
        choose: Choose,
        serving: Callable[[], bool],
        certificates: Certificates | None = None,
        console: Respond | None = None,
        trusts_host: Callable[[str], bool] = lambda host: True,
    ) -> None:
        """Listen. `serving` decides what /health says; `console` None means no console.

        `console`: None is a node without one.
        """
        self._choose = choose
        self._serving = serving
        self._console = console
        self._making = threading.Lock()  # of one text at a time
        # By content type and scope: until when it is good, and the reply.
        self._cached: dict[Hashable, tuple[float, Response]] = {}
        super().__init__(host, port, self._reply, certificates, trusts_host)

    def _reply(self, request: Request) -> Response | None:
        if self._console is not None and f"{request.path}/".startswith(f"{CONSOLE_PATH}/"):
            if request.connection.hurried:
                raise Unavailable("this node has no descriptor or no thread left for the console")
            return self._console(request)
        if request.method not in ("GET", "HEAD"):
            return text("GET or HEAD", 405)
        if request.path == HEALTH_PATH:
            return text("serving") if self._serving() else text("not serving", 503)
        return self._text(self._choose(request.headers, request.asker))

    def _text(self, answer: Answer) -> Response:
        key = (answer.content_type, answer.scope)
        with self._making:
            good_until, reply = self._cached.get(key, (0.0, None))
            began = time.monotonic()
            if reply is None or began >= good_until:
                reply = Response(answer.content_type, answer.body())
                now = time.monotonic()
                if len(self._cached) >= _CACHED_MAX:
                    self._cached.clear()
                self._cached[key] = (now + _AGE_FACTOR * (now - began), reply)
        return reply
