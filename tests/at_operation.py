"""A store that calls a function right before one chosen operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.storage.wrappers.forwarding import ForwardingStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage


class AtOperation(ForwardingStorage):
    """A store that calls a function once, before the `number`-th operation."""

    def __init__(self, inner: Storage, number: int, happens: Callable[[], object]) -> None:
        super().__init__(inner)
        self._left, self._happens = number, happens

    def around(self, inner: Storage, path: str) -> AtOperation:
        return AtOperation(inner, 0, self._happens)  # the place above is looked at, and nothing happens there

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], Any], half: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            self._happens()
        return whole()

    @property
    def happened(self) -> bool:
        """Whether the chosen operation was reached."""
        return self._left <= 0
