"""How do alerts reach somebody?  By the log, a webhook, a command, or e-mail."""

from __future__ import annotations

import json
import logging
import smtplib
import subprocess
from dataclasses import dataclass
from email.message import EmailMessage
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from reknit.errors import StorageError, UsageError
from reknit.keywords import checked_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.monitor.alerts.grouping import Told

logger = logging.getLogger("reknit")


class Log:
    """Alerts go to the logger ``reknit``, as warnings."""

    def take(self, records: Sequence[Told]) -> None:
        """Log each."""
        for one in records:
            logger.warning("%s", one)


@checked_call
@dataclass(frozen=True, slots=True)
class Webhook:
    """Alerts are posted as JSON to `url`: ``{"text": ..., "alerts": [...]}``, which chat services show.

    `headers` are sent with it.  The server is given `timeout_s`.
    """

    url: str
    headers: Mapping[str, str] | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise UsageError("the URL of a webhook begins with http:// or https://")

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"Webhook({urlsplit(self.url).hostname})"  # the rest is a secret

    def take(self, records: Sequence[Told]) -> None:
        """Post all, in one request.  Raises `OSError`."""
        body = {"text": "\n".join(map(str, records)), "alerts": [one.as_dict() for one in records]}
        headers = {"Content-Type": "application/json", **(self.headers or {})}
        with urlopen(Request(self.url, json.dumps(body).encode(), headers), timeout=self.timeout_s):
            return  # what it answers is of no interest


@checked_call
@dataclass(frozen=True, slots=True)
class Command:
    """Alerts are the input of a program, a line each; it is given `timeout_s`, and no shell is between."""

    arguments: tuple[str, ...]
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not self.arguments:
            raise UsageError("a command is a list of its program and its arguments", remedy="split the text")
        object.__setattr__(self, "arguments", tuple(self.arguments))

    def take(self, records: Sequence[Told]) -> None:
        """Run the program.  Raises `StorageError`, `OSError`, `subprocess.SubprocessError`."""
        text = "".join(f"{one}\n" for one in records).encode()
        done = subprocess.run(
            self.arguments, input=text, capture_output=True, timeout=self.timeout_s, check=False
        )
        if done.returncode:
            said = done.stderr[-200:].decode(errors="replace").strip()
            raise StorageError(f"{self.arguments[0]} ended with status {done.returncode}: {said}")


@checked_call
@dataclass(frozen=True, slots=True)
class Email:
    """Alerts are sent by e-mail, through the server at `host` and `port`, which is given `timeout_s`.

    With `user` and `password` it logs in, and only over TLS.
    """

    sender: str
    receivers: tuple[str, ...]
    host: str = "localhost"
    port: int = 25
    user: str | None = None
    password: str = ""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.receivers, str) or not self.receivers:
            raise UsageError("receivers is a list of addresses")
        object.__setattr__(self, "receivers", tuple(self.receivers))

    def __repr__(self) -> str:
        return f"Email({', '.join(self.receivers)})"  # without the password

    def take(self, records: Sequence[Told]) -> None:
        """Send all in one letter.  Raises `OSError`, `smtplib.SMTPException`."""
        letter = EmailMessage()
        more = f" and {len(records) - 1} more" if len(records) > 1 else ""
        letter["Subject"] = " ".join(f"reknit: {records[0]!s:.80}{more}".split())
        letter["From"], letter["To"] = self.sender, ", ".join(self.receivers)
        letter.set_content("\n".join(map(str, records)))
        with smtplib.SMTP(self.host, self.port, timeout=self.timeout_s) as server:
            if self.user is not None:
                server.starttls()
                server.login(self.user, self.password)
            server.send_message(letter)
