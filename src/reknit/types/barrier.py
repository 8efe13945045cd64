"""What keeps memory as it is while it is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Barrier(Protocol):
    """What all changes of some memory have to pass, such as the begin of an optimizer's step.

    Memory without a barrier may change at any time.
    """

    def stands(self) -> bool:
        """Put the barrier up if it is not, and tell whether it is known to be passed before each change."""

    def memory(self) -> Iterable[tuple[Any, int, int]]:
        """Return the ranges whose changes it keeps back: memory and first byte as in `devices`, and size."""

    def hold(self, wait: Callable[[], object]) -> None:
        """Let whoever comes to the barrier wait until `wait` returns."""

    def distrust(self) -> None:
        """Learn that the memory was changed past the barrier: it does not stand any more."""
