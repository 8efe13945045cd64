"""An Azure Blob server: Azurite, the emulator of those who make Azure."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import shutil
from typing import TYPE_CHECKING

from _process import free_ports, run, spawn

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "Azurite, an Azure Blob server"
AFTER = ()
TIMEOUT_S = 60

PACKAGE = "azurite@3.37.0"
ACCOUNT = "devstoreaccount1"
# The key that every emulator of Azure storage has; it is printed in its manual.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "reknit"
VERSION = "2023-11-03"


def install(home: Path) -> None:
    """Get the program."""
    told = home / "installed"
    if not told.exists() or told.read_text() != PACKAGE:
        run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), PACKAGE], cwd=home)
        told.write_text(PACKAGE)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, empty."""
    shutil.rmtree(home / "data", ignore_errors=True)
    port = free_ports(1)[0]
    options = ["--location", str(home / "data"), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command = [str(home / "node_modules/.bin/azurite-blob"), *options, "--silent", "--disableTelemetry"]
    return {
        "pids": [spawn([*command, "--skipApiVersionCheck"], home / "log", cwd=home)],
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "account_name": ACCOUNT,
        "account_key": KEY,
        "bucket": CONTAINER,
    }


def ready(server: dict) -> None:
    """Make the container; it may be there."""
    address = server["endpoint"].removeprefix("http://").partition("/")[0]
    date = email.utils.formatdate(usegmt=True)
    path = f"/{ACCOUNT}/{server['bucket']}"
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}"
    # An emulator has its account in the path, and then once more in what is signed.
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{headers}\n/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    sent = dict(line.split(":", 1) for line in headers.splitlines())
    sent["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("PUT", f"{path}?restype=container", headers={**sent, "Content-Length": "0"})
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"{address} answers {error!r}") from error
    finally:
        connection.close()
    if status not in (201, 409):
        raise RuntimeError(f"{address} answers {status} where a container is to be made")
