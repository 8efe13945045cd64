"""Notices of cloud providers that this host will end soon, from the metadata service of the instance."""

from __future__ import annotations

import json
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("reknit")

SERVICES = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
"""Addresses of the metadata services."""

POLL_S = 5.0
"""Notices come 30 s (Google Cloud, Azure) to two minutes (AWS) ahead."""

_ASK_S = 2.0
_MOST_NBYTES = 1 << 20
_ENDS = {"Preempt", "Terminate", "Redeploy", "Reboot"}
"""Types of events of Azure after which the processes of a host are gone."""


class CloudNotices:
    """Asks a provider every few seconds, in a thread, for a notice that this host will end; `seen` has it."""

    def __init__(self, provider: str) -> None:
        self.seen: str | None = None
        self._ask = partial(_PROVIDERS[provider], SERVICES[provider])
        self._provider = provider
        self._closed = threading.Event()
        start_thread("reknit-cloud-notices", self._watch)

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _watch(self) -> None:
        failed = False
        while not self._closed.is_set() and self.seen is None:
            try:
                self.seen, failed = self._ask(), False
            except Exception as error:  # a service may answer anything, and training goes on without it
                if not failed:
                    logger.warning("the metadata service of %s gives no notices: %s", self._provider, error)
                failed = True
            self._closed.wait(POLL_S)


def _aws(service: str) -> str | None:
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{service}/latest/api/token", lifetime, method="PUT")
    found = _get(
        f"{service}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token or ""}
    )
    if found is None:
        return None
    action = json.loads(found)
    return f"a notice of AWS: {action['action']} at {action['time']}"


def _gcp(service: str) -> str | None:
    get = partial(_get, headers={"Metadata-Flavor": "Google"})
    instance = f"{service}/computeMetadata/v1/instance"
    if get(f"{instance}/preempted") == "TRUE":
        return "a notice of Google Cloud: preempted"
    event = get(f"{instance}/maintenance-event") or ""
    return f"a notice of Google Cloud: {event}" if event.startswith("TERMINATE") else None


def _azure(service: str) -> str | None:
    get = partial(_get, headers={"Metadata": "true"})
    found = json.loads(get(f"{service}/metadata/scheduledevents?api-version=2020-07-01") or "{}")
    events = [event for event in found.get("Events", ()) if event["EventType"] in _ENDS]
    if not events:
        return None
    # All machines of a scale set receive its events.
    me = get(f"{service}/metadata/instance/compute/name?api-version=2021-02-01&format=text")
    for event in events:
        if me is None or me in event.get("Resources", (me,)):
            return f"a notice of Azure: {event['EventType']} at {event.get('NotBefore') or 'once'}"
    return None


_PROVIDERS: Mapping[str, Callable[[str], str | None]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}

# The address exists on this host only, so a proxy cannot reach it.
_open = build_opener(ProxyHandler({})).open


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return the body of an answer, or None if the service answers 404.  Raises `OSError`."""
    try:
        with _open(Request(url, headers=dict(headers), method=method), timeout=_ASK_S) as answer:
            body: bytes = answer.read(_MOST_NBYTES)
    except HTTPError as error:
        if error.code == 404:
            return None
        raise
    return body.decode().strip()
