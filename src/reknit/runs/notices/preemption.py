"""Notices that a process will end soon: signals, a file that comes into being, the cloud provider."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import UsageError
from reknit.locations import local_path
from reknit.monitor.phase import monotonic
from reknit.runs.notices.cloud_notices import CloudNotices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reknit.policies.save_policies import OnPreemption

logger = logging.getLogger("reknit")


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
