"""A call of `save` or `prepare` on one rank: its arguments, their checks, and the job that they ask for."""

from __future__ import annotations

import platform
import sys
from functools import cache, partial
from importlib import metadata as distributions
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from reknit.arguments import (
    check_flag,
    check_metadata,
    check_promotion,
    check_state,
    checked_step,
    place_of,
    warn_of_loose_tensors,
)
from reknit.engine.record.run_record import Run, folder_above
from reknit.engine.saving.save_job import SaveJob
from reknit.errors import UsageError
from reknit.frameworks import registry
from reknit.monitor.phase import Recorder
from reknit.monitor.sinks.choosing import outlets_for
from reknit.storage.registry import StoreRecipe, open_storage, recorded
from reknit.types.lazy_property import lazy_property

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit.comm.group import Group
    from reknit.errors import ReknitError
    from reknit.options import SaveOptions
    from reknit.ranks import Ranks
    from reknit.types.shard import Holdings


class SaveRequest(Struct, frozen=True, kw_only=True, dict=True):
    """The arguments of a call, as the user passed them; `wrong` is the error of its options.

    `records` are the records of the run that the save is a step of, by the URLs of their folders.

    The arguments are checked when the job is made, which happens inside the first round: an error on one rank
    is then raised on all.
    """

    path: str | PathLike[str]
    state: Mapping[str, Any]
    options: SaveOptions
    wrong: UsageError | None
    ranks: Ranks
    step: Any = None
    wait: Any = False
    overwrite: Any = False
    metadata: Any = None
    records: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """The ranks that make this call."""
        return self.ranks.group

    @lazy_property
    def place(self) -> StoreRecipe:
        """Return the place to save to, for an agent."""
        return place_of(self.path)

    @lazy_property
    def copies(self) -> list[StoreRecipe]:
        """Return the places to promote to, for an agent."""
        return [place_of(target.path) for target in self.options.promotions]

    @property
    def elsewhere(self) -> bool:
        """Whether another process can open all these places."""
        return all(place.elsewhere for place in (self.place, *self.copies))

    def raises(self, error: ReknitError) -> bool:
        """Return whether the call raises this error, or only logs it."""
        return self.options.on_error == "raise" or isinstance(error, UsageError)

    def save_job(self) -> SaveJob:
        """Check the arguments of a save, open its store, and return its job."""
        self._check()
        warn_of_loose_tensors(self.state)
        check_metadata(self.metadata or {})
        check_flag("wait", self.wait)
        check_flag("overwrite", self.overwrite)
        step = checked_step(self.step)
        storage = open_storage(self.path, durability=self.options.durability)
        if self.copies:
            check_promotion(storage, self.options, self.group.rank, overwrite=self.overwrite)
        recorder = Recorder("save", self.group.rank, step, storage.url, outlets_for(self.options.events))
        folder = folder_above(self.place.url)
        record = self.records.get(folder)
        return SaveJob(
            collect=self._collect,
            group=self.group,
            storage=recorded(storage, recorder),
            options=self.options,
            recorder=recorder,
            step=step,
            overwrite=self.overwrite,
            origin=_origin_of(self.group),
            metadata=self.metadata or {},
            url=self.place.url,
            factory=self.place.factory,
            promote_to=[
                (copy.url, copy.factory, target.bytes_per_s, self.records.get(folder_above(copy.url)))
                for copy, target in zip(self.copies, self.options.promotions, strict=True)
            ],
            run=None if record is None else Run(partial(open_storage, folder), record),
        )

    def warm_up_job(self) -> SaveJob:
        """Check the arguments of `prepare`, open its store, and return its job."""
        self._check()
        storage = open_storage(self.path, durability=self.options.durability)
        sinks = outlets_for(self.options.events)
        return SaveJob(
            collect=self._collect,
            group=self.group,
            storage=storage,
            options=self.options,
            recorder=Recorder("prepare", self.group.rank, None, storage.url, sinks),
            url=self.place.url,
            factory=self.place.factory,
        )

    def _check(self) -> None:
        if self.wrong is not None:
            raise self.wrong
        check_state(self.state)

    def _collect(self) -> Holdings:
        group, ranks, _ = self.ranks
        return registry.collect(self.state, group.rank, group.size, ranks=ranks)


def _origin_of(group: Group) -> dict[str, Any]:
    """Return the entry of the manifest about the job that wrote it; information only."""
    names = [name for name in ("reknit", "numpy", "torch", "jax") if name == "reknit" or name in sys.modules]
    versions = {name: version for name in names if (version := _version_of(name)) is not None}
    return {"world_size": group.size, "python": platform.python_version(), "versions": versions}


@cache
def _version_of(name: str) -> str | None:
    """Return the version of a package, or None if it runs from a source tree; it is parsed from a file."""
    try:
        return distributions.version(name)
    except distributions.PackageNotFoundError:
        return None
