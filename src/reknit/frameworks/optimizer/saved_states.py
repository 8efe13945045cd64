"""The parameters and states that a checkpoint has for an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.frameworks import tree
from reknit.frameworks.optimizer import memory_notes
from reknit.frameworks.optimizer.memory_notes import MEMORY, MemoryNotes
from reknit.frameworks.optimizer.param_options import EMPTY
from reknit.frameworks.optimizer.slots import MASTER, name_of
from reknit.frameworks.walk.walk import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.frameworks.optimizer.slots import Slots
    from reknit.frameworks.walk.load_walk import Loading


class SavedStates:
    """The names of the saved states of each parameter of one optimizer.

    `numbers` has the parameters, by name, that a number stands for in the checkpoint.
    """

    def __init__(self, place: Place, loading: Loading, slots: Slots, numbers: Mapping[str, int]) -> None:
        self._place, self._loading = place, loading
        self._numbers = numbers
        self._states: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._noted: set[str] = set()
        self.others: dict[str, list[Any]] = {"shared": [], "more": [], EMPTY: []}
        self.is_taken = False
        below = f"{place.fqn}/" if place.fqn else ""
        for fqn in (*loading.catalog.tensors.get(place.item, {}), *loading.saved.value_names(place.item)):
            part, _, rest = fqn.removeprefix(below).partition("/")
            if not (
                fqn.startswith(below) and rest and part in ("state", "param_groups", MEMORY, *self.others)
            ):
                continue
            if slots.load is not None and not self.is_taken:
                self.is_taken = loading.takes(Place(place.item, fqn))
            first, _, name = rest.partition("/")
            # A deeper name is a tensor inside a nested state: the state's own value requests it.
            if part == "state" and name and "/" not in name and name != MASTER:
                self._states.setdefault(first, []).append(name)
            elif part == "param_groups":
                self._known.add(rest)
            elif part == MEMORY:
                self._noted.add(rest)
            elif part in self.others and not name:
                self.others[part].append(name_of(first))

    def has_parameter(self, name: str) -> bool:
        """Return whether the saved optimizer had a parameter of this name.

        A saved optimizer of JAX's arrays has states, but no options.
        """
        return name in self._numbers or self.element(name) in self._known or bool(self.states(name))

    def is_numbered(self, name: str) -> bool:
        """Return whether the checkpoint has a number in the place of this name."""
        return name in self._numbers

    def element(self, name: str) -> str:
        """Return the path element of a parameter in the checkpoint."""
        return tree.escape(self._numbers.get(name, name), str(self._place))

    def notes(self, name: str) -> MemoryNotes:
        """Request the facts about the memory of a parameter's states."""
        if tree.escape(name, str(self._place)) not in self._noted:
            return MemoryNotes()
        return memory_notes.saved(self._place.child(MEMORY, name), self._loading)

    def states(self, name: str) -> list[str]:
        """Return the names (path elements) of a parameter's saved states."""
        return self._states.get(self.element(name), [])


def prefer_master(place: Place, loading: Loading, name: str, places: Sequence[Place]) -> None:
    """Load a parameter from saved master weights, unless it was saved in the present precision.

    Those in the precision of the saved parameter are that parameter once more, as other programs save it.
    """
    at = place.child("state", name, MASTER)
    if (master := loading.saved.spec(at)) is not None:
        loading.prefer(at, places)
        if any(loading.saved.spec(one) == master for one in places):
            loading.leave(at)
