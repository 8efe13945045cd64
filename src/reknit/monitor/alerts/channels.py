"""How are alerts sent?  To the log, or to a webhook; functions of users send them elsewhere."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from reknit.errors import UsageError
from reknit.keywords import checked_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.monitor.alerts.alert_groups import GroupedAlert

logger = logging.getLogger("reknit")


class Log:
    """Alerts go to the logger ``reknit``, as warnings."""

    def take(self, records: Sequence[GroupedAlert]) -> None:
        """Log each alert."""
        for alert in records:
            logger.warning("%s", alert)


@checked_call
@dataclass(frozen=True, slots=True)
class Webhook:
    """Alerts are posted as JSON to `url`: ``{"text": ..., "alerts": [...]}``, which chat services show.

    `headers` are sent with each request.  A request fails after `timeout_s`.
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
        """Post all alerts, in one request.  Raises `OSError`."""
        body = {"text": "\n".join(map(str, records)), "alerts": [alert.as_dict() for alert in records]}
        headers = {"Content-Type": "application/json", **(self.headers or {})}
        with urlopen(Request(self.url, json.dumps(body).encode(), headers), timeout=self.timeout_s):
            return  # the content of the answer does not matter
