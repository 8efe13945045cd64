"""What one rank is given to load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from reknit.engine.memory.workers import within

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LoadJob:
    """What one rank is given to load."""

    want: Callable[[Catalog], Wanted]
    """Walks through the target and returns what it takes of a checkpoint."""
    group: Group
    storage: Storage
    items: tuple[str, ...]
    options: LoadOptions
    recorder: Recorder
    carrier: Callable[[], Carrier] | None = None
    """Makes the transport of bytes to other hosts, if there is one."""
    replicas: Sequence[Storage] = ()
    """Other copies of the checkpoint, which replace damaged files of it."""
    lenient: tuple[str, ...] = ()
    """Patterns of names that need not fit (`selects`)."""

    def within_deadline(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Ask the storage for something, and wait no longer than other ranks would wait for this one."""
        return within(self.options.timeout_s, lambda: f"{what} {self.storage.url}", work)
