"""The input of one rank's load: the arguments of the call, checked, with its ranks and open stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, field

from reknit.engine.memory.workers import within
from reknit.frameworks import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.events.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted

_Result = TypeVar("_Result")


class LoadTask(Struct, frozen=True, eq=False):
    """The input of one rank's load.

    `targets` are the items of the state that are loaded; the others are `beside` them, for names only.
    """

    group: Group
    storage: Storage
    targets: Mapping[str, Any]
    options: LoadOptions
    recorder: Recorder
    beside: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    """The numbers of the ranks in the whole job; None: the same as in the group."""
    carrier: Callable[[], Carrier] | None = None
    """Makes the transport of bytes to other hosts, if there is one."""
    replicas: Sequence[Storage] = ()
    """Other copies of the checkpoint, whose blocks replace damaged blocks."""
    lenient: tuple[str, ...] = ()
    """Patterns of names that need not fit (`selects`)."""

    @property
    def items(self) -> tuple[str, ...]:
        """The names of the items that are loaded."""
        return tuple(self.targets)

    def wanted(self, catalog: Catalog) -> Wanted:
        """Walk through the targets, and return the entries that they take of a checkpoint."""
        rank, size = self.group.rank, self.group.size
        return registry.wanted(self.targets, catalog, rank, size, ranks=self.ranks, beside=self.beside)

    def within_deadline(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work` in the storage, within the time that other ranks wait for this rank."""
        return within(self.options.timeout_s, lambda: f"{what} {self.storage.url}", work)
