"""Notices that a process will end soon: signals, and a file that comes into being."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reknit.policies.saving import OnPreemption

logger = logging.getLogger("reknit")


class Notices:
    """Watches for what the policies name; a handler of a signal takes note, and calls the one before it."""

    def __init__(self, policies: Iterable[OnPreemption]) -> None:
        self._what: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._files: list[str] = []
        self._process: int | None = os.getpid()
        try:
            for policy in policies:
                if policy.file is not None:
                    self._files.append(os.fspath(policy.file))
                for number in policy.signals:
                    self._watch(number)
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
        # A process that was forked has this handler too, and so has one whose checkpointer is closed, where a
        # later handler calls this one.  Both do what they would do without.
        watching = self._process == os.getpid()
        if watching:
            self._what = signal.Signals(number).name
        if callable(before) and not (watching and before is signal.default_int_handler):
            before(number, frame)
        elif not watching and before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def seen(self) -> str | None:
        """Say what was noticed, None for nothing yet."""
        if self._what is None:
            self._what = next((f"the file {path}" for path in self._files if os.path.exists(path)), None)
        return self._what

    def close(self) -> None:
        """Give the signals back to the handlers that were there before."""
        self._process = None
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
