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
        for policy in policies:
            if policy.file is not None:
                self._files.append(os.fspath(policy.file))
            for number in policy.signals:
                self._watch(number)

    def _watch(self, number: signal.Signals) -> None:
        if number in self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"only the main thread can watch for {number.name}",
                remedy="make the Checkpointer there, or watch a file: on_preemption(file=...)",
            )
        self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._what = signal.Signals(number).name
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def seen(self) -> str | None:
        """Say what was noticed, None for nothing yet."""
        if self._what is None:
            self._what = next((f"the file {path}" for path in self._files if os.path.exists(path)), None)
        return self._what

    def close(self) -> None:
        """Give the signals back to the handlers that were there before."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()
