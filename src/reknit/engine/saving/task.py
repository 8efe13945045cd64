"""One save of one rank: the place that it goes to, its options, and the run that it is a step of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.stored.run_record import Run
    from reknit.events.phase import Recorder
    from reknit.options import Durability, SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.shard import Holdings


class SavePlace(Protocol):
    """The place of a checkpoint; `url` and `factory` let another process open its store."""

    @property
    def url(self) -> str:
        """The URL, or the absolute path of a folder."""

    @property
    def factory(self) -> str | None:
        """The factory of the trainer's program for such stores, if it has one (`storage.registry.recipe`)."""

    def open(self, durability: Durability, recorder: Recorder) -> Storage:
        """Open the store, whose operations are recorded (`storage.registry.StoreRecipe`)."""

    def copies_files(self, durability: Durability) -> bool:
        """Return whether the store can copy files of an earlier checkpoint."""


class SaveTask(Struct, kw_only=True, eq=False, dict=True):
    """The input of one rank's save, for a save that waits, for a trainer, and for its agent, without a state.

    `step`, `origin` and `metadata` go into the manifest.  `promote_to` has the URL, factory and rate of each
    store to which the checkpoint is promoted, and the record of the run there.  `run` is the run that the
    checkpoint is a step of, or None.  `ranks` are the numbers of the group's ranks in the whole job, None for
    the same numbers.  The writer raises the error `wrong` of the arguments on all ranks.
    """

    place: SavePlace
    group: Group
    options: SaveOptions
    recorder: Recorder
    state: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    overwrite: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    promote_to: list[tuple[str, str | None, float | None, str | None]] = []
    run: Run | None = None
    ranks: Sequence[int] | None = None
    wrong: BaseException | None = None
    if TYPE_CHECKING:
        storage: Storage = cast("Storage", None)
        """The store of the place, in the process that writes the files: a task begins without it."""
    after: Sequence[SaveOutcome] = ()
    """Saves under way to the same place, which have to end before."""

    def holdings(self) -> Holdings:
        """Walk through the state, and return the shards and values of this rank, as views of live memory."""
        from reknit.frameworks import registry  # an agent has no state

        return registry.collect(self.state, self.group.rank, self.group.size, ranks=self.ranks)

    def close(self) -> None:
        """Close the store, if it is open."""
        if hasattr(self, "storage"):
            self.storage.close()
