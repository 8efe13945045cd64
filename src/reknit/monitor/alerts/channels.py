"""How are alerts sent?  To the log, or to a webhook; functions of users send them elsewhere."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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

    def take(self, records: Sequence[GroupedAlert]) -> None:
        """Post all alerts, in one request.  Raises `OSError`, `StorageError`."""
        body = {"text": "\n".join(map(str, records)), "alerts": [alert.as_dict() for alert in records]}
        headers = {"Content-Type": "application/json", **(self.headers or {})}
        post(self.url, json.dumps(body, default=str).encode(), headers, self.timeout_s)
