"""One save of one rank: what is saved, with whom, to where, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.base import Group
    from reknit.engine.saving.commit import Destination
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.types.shard import Holdings


@dataclass(frozen=True, slots=True)
class SaveJob:
    """What one rank is given to save; the same for a save that waits, for a trainer, and for its agent.

    An agent opens storage again by its `url`, with the `factory` that only the trainer's program knows, if
    there is one (`storage.registry.recipe`).  `promote_to` are URL and factory of the store that is to have
    the checkpoint too.  An agent does not `collect`: it gets what its trainer staged.
    """

    collect: Callable[[], Holdings]
    group: Group
    to: Destination
    options: SaveOptions
    recorder: Recorder
    url: str = ""
    factory: str | None = None
    promote_to: tuple[str, str | None] | None = None
