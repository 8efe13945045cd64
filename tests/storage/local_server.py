"""An HTTP server of this process, which ends with a ``with`` statement."""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalServer:
    """Answers by a class of handlers, which have the entries of `shared` as attributes."""

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler], **shared: Any) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), shared))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
