"""The interface of barriers, which delay changes of memory while it is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Barrier(Protocol):
    """A place through which all changes of some memory pass, such as the begin of an optimizer's step.

    Memory without a barrier may change at any time.
    """

    def stands(self) -> bool:
        """Install the barrier unless it is there; return whether every change is sure to pass it."""

    def memory(self) -> Iterable[tuple[Any, int, int]]:
        """Return the ranges that it guards: memory and first byte as in `devices`, and size."""

    def hold(self, wait: Callable[[], object]) -> None:
        """Make every change that reaches the barrier wait until `wait` returns."""

    def distrust(self) -> None:
        """Remove the barrier, because the memory was changed without passing it."""
