"""Notices that a process will end soon (signals, files, cloud providers), and the round that follows one.

Ranks that train in step must take part in the same rounds of the run, or each would wait for another.  So a
rank that has a notice cannot begin a round alone.  A thread of each rank looks at its notices every two
seconds, and the threads hold rounds of a group of their own, in which training takes no part:

1. *look*: has any rank a notice?  Training goes on.
2. *meet*, only after a notice: each rank sends the number of calls that it has begun.  Its next call waits
   for the answer, which is the highest of these numbers.  The call after that is the round of all ranks.

No rank has begun that call, because each would have had to wait before.  The wait ends, since it depends on
the threads alone: a rank that is inside a step, a collective or a planned round answers all the same.  If the
round *meet* fails before rank 0 has all numbers, no rank has an answer, and all go on with the planned
rounds.  A rank that alone loses the answer is a rank whose connection broke; the others find that out in
their round, which has a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from reknit.comm import group as comm
from reknit.errors import GroupClosedError, ReknitError, UsageError
from reknit.events.phase import monotonic
from reknit.locations import local_path
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reknit.comm.group import Group
    from reknit.policies.save_policies import OnPreemption


logger = logging.getLogger("reknit")

LOOK_S = 2.0
"""A notice waits at most so long, and then for the end of the step that each rank is in."""
_CLOSE_S = 5.0


class EarlyRounds:
    """Decides with the threads of the other ranks which call of `begins` is a round of all ranks.

    `side` is a group for these threads alone, which `close` closes; `noticed` returns whether this rank has a
    notice.  `round` is the number of the call that is a round, 0 before a notice, and `waits` is whether the
    next call waits.  All ranks make this object before the same call.  Raises `ShortageError`, and closes the
    group, so that the threads of the other ranks end as well.
    """

    def __init__(self, side: Group, noticed: Callable[[], bool], timeout_s: float) -> None:
        self._side, self._noticed, self._timeout_s = side, noticed, timeout_s
        self._changed = threading.Condition()  # guards the three below
        self._num_begun, self.round = 0, 0
        self.waits = False
        self._over = threading.Event()
        try:
            self._thread = start_thread("reknit-notices", self._watch)
        except BaseException:
            side.close()
            raise

    def begins(self) -> bool:
        """Count a call of this rank, and return whether it is the round of all ranks."""
        with self._changed:
            while self.waits:
                self._changed.wait()
            self._num_begun += 1
            return self._num_begun == self.round

    def close(self) -> None:
        """Look for notices no longer."""
        self._over.set()
        self._side.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                if self._look():
                    self.meet()
                    return  # from now on the run itself has the notice
        except ReknitError as error:
            if not (self._over.is_set() or isinstance(error, GroupClosedError)):
                logger.warning("a notice may wait for the next planned round: %s", error)
            self._side.close()  # no other rank may wait for this one

    def _look(self) -> bool:
        """Return whether any rank has a notice."""
        with comm.turn(self._side, "look", self._timeout_s, merge=any) as turn:
            noticed = turn.gather(self._noticed())
            return turn.give_all(noticed is not None and any(noticed), bool)

    def meet(self) -> None:
        """Let all ranks hold a round at one call, which none of them has begun."""
        try:
            with comm.turn(self._side, "meet", self._timeout_s, merge=max) as turn:
                with self._changed:
                    self.waits = True
                    mine = self._num_begun
                begun = turn.gather(mine)
                highest = turn.give_all(None if begun is None else max(begun), int)
            with self._changed:
                self.round = highest + 1
        finally:
            with self._changed:
                self.waits = False
                self._changed.notify_all()


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


class Notice(NamedTuple):
    """The reason why a process will end, and the time by `monotonic`, None if the notice has no time."""

    what: str
    ends_at: float | None


class Notices:
    """Watches for the notices that policies name; a handler of a signal also calls the previous handler."""

    def __init__(self, policies: Iterable[OnPreemption]) -> None:
        self._notice: Notice | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._graces: dict[signal.Signals, float | None] = {}
        self._files: dict[str, float | None] = {}
        self._clouds: dict[str, tuple[CloudNotices, float | None]] = {}
        self._process: int | None = os.getpid()
        try:
            for policy in policies:
                if policy.file is not None:
                    self._files[local_path(policy.file, "notice is given by")] = policy.grace_s
                for number in policy.signals:
                    self._graces[number] = policy.grace_s
                    self._watch(number)
                if policy.cloud is not None and policy.cloud not in self._clouds:
                    self._clouds[policy.cloud] = CloudNotices(policy.cloud), policy.grace_s
        except BaseException:
            self.close()
            raise

    def _watch(self, number: signal.Signals) -> None:
        if number in self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"only the main thread can watch for {number.name}",
                remedy="create the Checkpointer there, or watch a file: on_preemption(file=...)",
            )
        try:
            self._before[number] = signal.signal(number, self._note)
        except OSError as error:
            raise UsageError(f"cannot handle {number.name}: {error.strerror}") from error

    def _note(self, number: int, frame: Any) -> None:
        before = self._before[signal.Signals(number)]
        # A forked process inherits this handler.  A process whose checkpointer is closed still has it if a
        # later handler calls it.  In both, the signal has the effect that it would have without this handler.
        watching = self._process == os.getpid()
        if watching:
            self._take(signal.Signals(number).name, self._graces[signal.Signals(number)])
        if callable(before) and not (watching and before is signal.default_int_handler):
            before(number, frame)
        elif not watching and before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _take(self, what: str, grace_s: float | None) -> None:
        self._notice = Notice(what, None if grace_s is None else monotonic() + grace_s)

    def seen(self) -> Notice | None:
        """Return the notice, or None before one."""
        if self._notice is None:
            for path, grace_s in self._files.items():
                if os.path.exists(path):
                    self._take(f"the file {path}", grace_s)
            for cloud, grace_s in self._clouds.values():
                if cloud.seen is not None:
                    self._take(cloud.seen, grace_s)
        return self._notice

    def close(self) -> None:
        """Restore the previous handlers of the signals.

        Python lets only the main thread do that.  In another thread the handlers stay, and only call the
        previous ones.
        """
        self._process = None
        for cloud, _ in self._clouds.values():
            cloud.close()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                before = _still_there(number, before)
                signal.signal(number, signal.SIG_DFL if before is None else before)


def _still_there(number: signal.Signals, handler: Any) -> Any:
    """Return a handler; in place of a handler of closed notices, return the one before it."""
    while isinstance(notices := getattr(handler, "__self__", None), Notices) and notices._process is None:
        handler = notices._before[number]
    return handler
