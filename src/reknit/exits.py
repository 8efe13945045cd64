"""What is done when this process ends."""

from __future__ import annotations

import atexit
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class AtExit:
    """Calls `action` once when this process ends by itself, the last one made first; `cancel` takes it back.

    One that is `last` comes after all that are not.  Processes that `multiprocessing` forks, from this one or
    from its fork server, end without the functions of `atexit`, but with finalizers of their own.
    """

    def __init__(self, action: Callable[[], object], *, last: bool = False) -> None:
        self._action: Callable[[], object] | None = action
        if not last:  # the finalizers run later: `multiprocessing` was imported before
            atexit.register(self._run)
        self._finalizer = Finalize(None, self._run, exitpriority=-1 if last else 0)

    def cancel(self) -> None:
        """Forget the action; nothing happens if it was called."""
        self._action = None
        atexit.unregister(self._run)
        self._finalizer.cancel()

    def _run(self) -> None:
        action = self._action
        self.cancel()
        if action is not None:
            action()
