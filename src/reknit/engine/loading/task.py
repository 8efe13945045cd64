"""The input of one rank's load, and the parts of it that are read at once."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from reknit.engine.loading.read import RangeReader
from reknit.engine.memory.workers import within
from reknit.engine.sharing.shared_read import SharedRead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import ExitStack

    from reknit.comm.group import Group
    from reknit.engine import messages
    from reknit.engine.loading.match import Fill
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.events.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.transforms.base import Rule
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LoadJob:
    """The input of one rank's load."""

    want: Callable[[Catalog], Wanted]
    """Walks through the target and returns the entries that it takes of a checkpoint."""
    group: Group
    storage: Storage
    items: tuple[str, ...]
    options: LoadOptions
    _: KW_ONLY
    recorder: Recorder
    carrier: Callable[[], Carrier] | None = None
    """Makes the transport of bytes to other hosts, if there is one."""
    rules: Callable[[str], list[Rule]] | None = None
    """Returns the rules that the targets bring along for the files of a program."""
    replicas: Sequence[Storage] = ()
    """Other copies of the checkpoint, whose blocks replace damaged blocks."""
    lenient: tuple[str, ...] = ()
    """Patterns of names that need not fit (`selects`)."""

    def within_deadline(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of `work` in the storage, within the time that other ranks wait for this rank."""
        return within(self.options.timeout_s, lambda: f"{what} {self.storage.url}", work)


class LoadPart(Struct):
    """Boxes that are filled together, their reader, and the number of bytes from other ranks."""

    fills: Sequence[Fill]
    reader: RangeReader
    nbytes_received: int = 0
    shared: SharedRead | None = None

    @classmethod
    def of(cls, job: LoadJob, checkpoint: OpenCheckpoint, fills: Sequence[Fill]) -> LoadPart:
        """Plan the reads for some boxes; the checkpoint has the rows of the index that they need."""
        reader = RangeReader(
            checkpoint,
            [(fill.tensor, fill.box, fill.target) for fill in fills],
            job.options,
            cast=frozenset(number for number, fill in enumerate(fills) if fill.cast),
            moved=job.recorder.advance,
        )
        return cls(fills, reader)

    def share(self, job: LoadJob, last: ExitStack) -> None:
        """Begin the part of this rank in a shared read, which ends with `last`."""
        files = self.reader.checkpoint.index.files
        self.shared = SharedRead.begin(job.group, job.carrier, self.reader, files, self.reader.options)
        last.callback(self.shared.close)

    def offer(self) -> messages.Offer | None:
        """Return the ranges that this rank would read, if they may be shared."""
        return None if self.shared is None else self.shared.offer()
