"""The calls of `torch.distributed.checkpoint` (DCP), which write and read checkpoints of reknit.

`Writer` and `Reader` are a storage writer and a storage reader of DCP, and `save`, `async_save` and `load`
are its calls with these.  The checkpoint is one of reknit: without pickle, with digests, committed at once.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as torch_dcp

import reknit
from reknit.integrations.dcp.planner import DcpReader as Reader
from reknit.integrations.dcp.planner import DcpWriter as Writer
from reknit.integrations.dcp.planner import required
from reknit.locations import location_text
from reknit.plugins.store import open_storage
from reknit.plugins.trainer import manifest_exists

if TYPE_CHECKING:
    from os import PathLike

    from reknit.plugins.trainer import AnyGroup

__all__ = ["Reader", "Writer", "async_save", "load", "save"]

_TORCHS = ".metadata"
"""The file that marks a checkpoint in DCP's own format."""


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | PathLike[str] | None = None,
    storage_writer: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    **others: Any,
) -> Any:
    """Save a state dict as `dcp.save` does, at `checkpoint_id`, as a checkpoint of reknit.

    Every rank calls it.  The arguments are those of `dcp.save`, and `others` are passed on.  A checkpoint
    that is there is replaced by a safe switch.  Returns DCP's metadata.  DCP raises the errors of
    `reknit.save` as its `CheckpointException`.
    """
    writer = storage_writer or Writer(checkpoint_id, group=_group(process_group, no_dist=no_dist))
    others |= {"checkpoint_id": checkpoint_id, "process_group": process_group, **_alone(no_dist=no_dist)}
    return torch_dcp.save(state_dict, storage_writer=writer, **others)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | PathLike[str] | None = None,
    storage_writer: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    **others: Any,
) -> Any:
    """Copy a state dict and save it as `dcp.async_save` does; return its future.

    The state may change when this returns.  Agents write and commit, even if the trainer dies.
    """
    writer = storage_writer or Writer(checkpoint_id, group=_group(process_group, no_dist=no_dist))
    others |= {"checkpoint_id": checkpoint_id, "process_group": process_group, **_alone(no_dist=no_dist)}
    return torch_dcp.async_save(state_dict, storage_writer=writer, **others)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | PathLike[str] | None = None,
    storage_reader: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    **others: Any,
) -> None:
    """Load into a state dict as `dcp.load` does, from a checkpoint of reknit, or one in DCP's own format."""
    group = _group(process_group, no_dist=no_dist)
    if storage_reader is None and not is_torchs(required(checkpoint_id, "Reader")):
        storage_reader = Reader(checkpoint_id, group=group)
    torch_dcp.load(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_reader=storage_reader,
        process_group=process_group,
        **others,
        **_alone(no_dist=no_dist),
    )


def _group(process_group: Any, *, no_dist: bool) -> AnyGroup | None:
    return reknit.alone() if no_dist else process_group


def _alone(*, no_dist: bool) -> dict[str, bool]:
    """Return the argument of a call without other ranks, which older versions of torch lack."""
    return {"no_dist": True} if no_dist else {}


def is_torchs(path: str | PathLike[str]) -> bool:
    """Return whether a folder has a checkpoint in DCP's own format, and none of reknit."""
    if not os.path.exists(os.path.join(location_text(path), _TORCHS)):
        return False
    with closing(open_storage(path)) as storage:
        return not manifest_exists(storage)
