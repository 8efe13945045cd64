"""How are alerts sent?  To the log, or to a webhook; functions of users send them elsewhere."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from reknit.errors import UsageError, printable
from reknit.keywords import checked_call
from reknit.monitor.web_post import post

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.monitor.alerts.alert_groups import GroupedAlert

logger = logging.getLogger("reknit")


class Log:
    """Alerts go to the logger ``reknit``, as warnings."""

    def take(self, records: Sequence[GroupedAlert]) -> None:
        """Log each alert."""
        for alert in records:
            logger.warning("%s", printable(alert))  # texts of errors must not steer a terminal


@checked_call
@dataclass(frozen=True, slots=True)
class Webhook:
    """Alerts are posted as JSON to `url`: ``{"text": ..., "alerts": [...]}``, which chat services show.

    `headers` are sent with each request.  A request fails after `timeout_s`, and if the server redirects it.
    A user and a password in the URL, ``https://user:password@host``, are sent as HTTP's basic authentication.
    """

    url: str
    headers: Mapping[str, str] | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            fits = urlsplit(self.url).scheme in ("http", "https")
        except ValueError:  # its text may have a part of the password
            fits = False
        if not fits:
            raise UsageError(
                "the URL of a webhook begins with http:// or https://",
                remedy="write https://host/path, and /, # and @ of a password as %2F, %23 and %40",
            )

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"Webhook({urlsplit(self.url).hostname})"  # the rest is a secret

    def take(self, records: Sequence[GroupedAlert]) -> None:
        """Post all alerts, in one request.  Raises `OSError`, `StorageError`."""
        body = {"text": "\n".join(map(str, records)), "alerts": [alert.as_dict() for alert in records]}
        url, identity = self._place
        headers = {"Content-Type": "application/json", **identity, **(self.headers or {})}
        post(url, json.dumps(body, default=str).encode(), headers, self.timeout_s)

    @property
    def _place(self) -> tuple[str, dict[str, str]]:
        """The URL without a user and a password, and the header that has these."""
        parts = urlsplit(self.url)
        if parts.username is None:
            return self.url, {}
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return url, {"Authorization": f"Basic {b64encode(user).decode()}"}
