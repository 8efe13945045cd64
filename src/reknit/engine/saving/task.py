"""One save of one rank: its state, its group, its store, and its options."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.engine.stored.run_record import Run
    from reknit.events.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.shard import Holdings


@dataclass(frozen=True, slots=True)
class SaveJob:
    """The input of one rank's save, for a save that waits, for a trainer, and for its agent.

    `step`, `origin` and `metadata` go into the manifest.  An agent opens its own storage by `url`, with
    the `factory` of the trainer's program, if there is one (`storage.registry.recipe`).  `promote_to` has the
    URL, factory and rate of each store to which the checkpoint is promoted, and the record of the run there.
    An agent does not `collect`: it receives the files that its trainer stages.  `run` is the run that the
    checkpoint is a step of, or None.
    """

    collect: Callable[[], Holdings]
    group: Group
    storage: Storage
    options: SaveOptions
    recorder: Recorder
    _: KW_ONLY
    step: int | None = None
    overwrite: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    factory: str | None = None
    promote_to: Sequence[tuple[str, str | None, float | None, str | None]] = ()
    run: Run | None = None

    def holdings(self) -> Holdings:
        """Collect the holdings of this rank, and give the recorder its place in the parallel grid."""
        found = self.collect()
        self.recorder.coordinate = dict(found.coordinate)
        return found
