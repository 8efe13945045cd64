"""The actions of a load on live objects: first on objects that take their state whole, then on all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, field

from reknit.errors import ReknitError, StateError, shortage
from reknit.frameworks.walk.own_code import cause
from reknit.types.entry import own_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.frameworks.walk.walk import Arrays, Place


class Delivery(NamedTuple):
    """An action on the object at a place of the target; `kind` is its type."""

    place: Place
    kind: str
    action: Callable[[], None]

    def run(self, others: str = "") -> None:
        """Run the action.  Raises a `StateError` for an exception of the object's own code.

        `others` states in the error which other objects have been changed.
        """
        try:
            with own_code():
                self.action()
        except ReknitError as error:
            if not error.message.startswith(str(self.place)):  # of a load inside of its own code
                error.message = f"{self.place} ({self.kind}): {error.message}"
            error.message += others
            raise
        except Exception as error:
            raise shortage(error) or StateError(
                f"{self.place} ({self.kind}) could not be loaded: {cause(error)}{others}",
                remedy="load into an object that takes the saved state, or leave it out of the load with "
                "`items` or LoadOptions(only=...)",
            ) from error


class DeliveryPart(Struct):
    """The memory to fill, its checks and settling actions, and the deliveries; `names` if it is early."""

    names: list[str] = field(default_factory=list)
    filled: list[Any] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    settles: list[Callable[[], None]] = field(default_factory=list)
    actions: list[Delivery] = field(default_factory=list)

    def settle(self, libraries: Iterable[Arrays]) -> None:
        """Pass the filled memory to the libraries, check it, and copy it to its place."""
        for library in libraries:
            library.changed(self.filled)
        for action in (*self.checks, *self.settles):
            action()

    def run(self) -> None:
        """Run all actions."""
        for delivery in self.actions:
            delivery.run()

    def run_each(self, num_ranks: int) -> None:
        """Run all actions; an error names the objects that were loaded, which cannot be undone."""
        others = "" if num_ranks == 1 else "; other ranks may have loaded their objects"
        loaded: list[str] = []
        for delivery in self.actions:
            before = f"; loaded before it: {', '.join(loaded)}" if loaded else ""
            delivery.run(f"; its code may have changed it before that{before}{others}")
            loaded.append(str(delivery.place))
