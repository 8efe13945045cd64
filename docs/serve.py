"""Show a folder of pages on 127.0.0.1 until Ctrl-C: python docs/serve.py FOLDER PORT."""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer


class Pages(SimpleHTTPRequestHandler):
    """The files of a folder, without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def main(folder: str, port: str) -> int:
    """Serve the folder, and return the exit status."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", int(port)), partial(Pages, directory=folder))
    except (OSError, OverflowError) as error:
        print(
            f"scripts/docs: cannot listen on port {port}: {error}; "
            f"pass another: scripts/docs serve {int(port) % 65535 + 1}",
            file=sys.stderr,
        )
        return 1
    with server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nscripts/docs: ended", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
