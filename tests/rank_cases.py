"""Cases that all ranks of one job call, one after another: a job for each case would take longer."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Cases(dict[str, "Callable[..., None]"]):
    """The cases of a module by name; `@cases.add` adds one, and `failure` returns the traceback of one."""

    def __init__(self) -> None:
        super().__init__()
        self._failures: list[dict[str, str]] | None = None

    def add(self, fn: Callable[..., None]) -> Callable[..., None]:
        self[fn.__name__] = fn
        return fn

    def failure(self, name: str, job: Callable[[], dict[str, str]], world: int, **how: Any) -> str | None:
        """Return the traceback of a case, None if all ranks passed.  The first call runs all by `job`."""
        if self._failures is None:
            self._failures = run(world, job, timeout=200, **how)
        return next((failed[name] for failed in self._failures if name in failed), None)

    def tracebacks(
        self, *args: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, str]:
        """Call all cases on this rank, and return the tracebacks of the failures."""
        failed = {}
        for name, fn in self.items():
            torch.manual_seed(0)
            try:
                with around():
                    fn(*args)
            except Exception:  # the test of this name fails with it
                failed[name] = traceback.format_exc()
        return failed
