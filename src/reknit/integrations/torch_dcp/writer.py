"""How does `dcp.save` write a checkpoint of reknit?  By a storage writer that saves the planner's state."""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.planner import WriteItemType

from reknit.api import saves
from reknit.errors import UsageError
from reknit.frameworks.custom import registered
from reknit.integrations.torch_dcp import names
from reknit.integrations.torch_dcp.reader import (
    ITEM,
    PLANS,
    RAW,
    DcpReader,
    done,
    group_of,
    overrides,
    required,
)
from reknit.locations import location_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from reknit.engine.outcome import PendingSave
    from reknit.options import SaveOptions
    from reknit.ranks import AnyGroup

_HOOKS = ("resolve_data", "lookup_object", "transform_object")
_NUMBER = re.compile(r"(?:[A-Za-z_]+[-_])?(\d+)")


class DcpWriter(StorageWriter):
    """The storage writer for `dcp.save` and `dcp.async_save`: each call makes one checkpoint at `path`.

    Every rank makes one with the same arguments.  `step` is by default the number at the end of a name such
    as ``step-100``.  `item` is the item of entries without levels (tensors directly in the state dict); by
    default that is ``model`` for a state dict of nothing else, and otherwise each is an item.  `group` is the
    `process_group` of the call, if that has one.  The other arguments are those of `reknit.save`.

    `async_save` copies the state by agents, which commit even if the trainer dies.
    """

    _synchronize_after_execute = False
    should_synchronize_after_execute = False

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        step: int | None = None,
        item: str | None = None,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        options: SaveOptions | None = None,
        group: AnyGroup | None = None,
    ) -> None:
        self.checkpoint_id = path
        self._step, self._item, self._overwrite = step, item, overwrite
        self._metadata, self._options, self._group = dict(metadata or {}), options, group
        self._staged: deque[PendingSave | None] = deque()
        self._collective = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process; saves that agents write end first, in this process."""
        for pending in self._staged:
            if pending is not None:
                pending.result()
        return {**vars(self), "_staged": deque([None] * len(self._staged)), "_group": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Take the path of the next checkpoint."""
        if checkpoint_id is None:
            return
        if self._staged:  # from the path that `stage` has required
            now, new = location_text(self._path()), location_text(checkpoint_id)
            if new != now:
                raise UsageError(
                    f"this save is already written to {now}, not to {new}",
                    remedy="pass the path to Writer alone",
                )
        self.checkpoint_id = checkpoint_id

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the state, which agents then write; DCP has nothing left to plan and to copy."""
        if self.checkpoint_id is None:
            raise UsageError("async_save copies a state before it names a path", remedy="write Writer(path)")
        planner = DefaultSavePlanner()
        planner.set_up_planner(state_dict)
        state, paths = planner.state_dict, planner.mappings
        tensors = any(isinstance(value, torch.Tensor) for value in state.values())
        held = names.item_for(paths.values(), self._item, tensors=tensors)
        self._staged.append(self._save(state, paths, held, self._group, wait=False))
        return {}

    def synchronize_staging(self) -> None:
        """Do nothing: the state is copied when `stage` returns."""

    def close(self) -> None:
        """Do nothing: agents end with the process."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note whether the ranks of this save plan together."""
        self._collective = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: reknit makes its own."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Record in each plan the number of ranks, and the item of entries without levels."""
        paths = [
            (plan.planner_data or {}).get(item.index.fqn, (item.index.fqn,))
            for plan in plans
            for item in plan.items
        ]
        tensors = any(item.type != WriteItemType.BYTE_IO for plan in plans for item in plan.items)
        held = names.item_for(paths, self._item, tensors=tensors)
        return [replace(plan, storage_data=(len(plans), held)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Save the state together with the other ranks, or wait for the save that `stage` began."""
        own = overrides(planner, DefaultSavePlanner, (*PLANS, *_HOOKS))
        if self._staged:
            if own:
                raise UsageError(
                    f"the state was copied before {type(planner).__name__} could plan it",
                    # Without these options it needs an accelerator.
                    remedy="pass async_stager=DefaultStager(StagingOptions(False, False, False, False)) to "
                    "async_save, or leave planner out",
                )
            pending = self._staged.popleft()
            if pending is not None:
                pending.result()
            return done([])
        num_ranks, held = plan.storage_data or (None, self._item)
        group = group_of(self._group, num_ranks if self._collective else None)
        values = self._pieces(plan, planner) if own else planner.state_dict
        self._save(values, getattr(planner, "mappings", {}), held, group, wait=True).result()
        return done([])

    def _pieces(self, plan: SavePlan, planner: Any) -> dict[str, Any]:
        """Return the entries that a planner's plan names, as the planner resolves them."""
        entries: dict[str, Any] = {}
        for item in plan.items:
            name, resolved = item.index.fqn, planner.resolve_data(item)
            if item.tensor_data is not None:
                piece = entries.setdefault(name, names.PlannedPieces(refused=names.misplaced(planner, name)))
                piece.add(item.tensor_data.size, item.tensor_data.chunk.offsets, resolved.detach())
                continue
            entries[name] = names.encoded(RAW, resolved)
            if isinstance(planner, DefaultSavePlanner):
                value = planner.lookup_object(item.index)
                usual: Any = DefaultSavePlanner.transform_object(planner, item, value)
                if usual.getvalue() == resolved.getvalue():  # reknit encodes it without pickle
                    entries[name] = value
        return entries

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Fill the metadata of a save that DCP did not plan; the checkpoint is committed already."""
        if not metadata.state_dict_metadata:
            whole = DcpReader(self._path()).read_metadata()
            metadata.state_dict_metadata, metadata.planner_data = (
                whole.state_dict_metadata,
                whole.planner_data,
            )

    def _save(
        self,
        values: Mapping[str, Any],
        paths: Mapping[str, Any],
        item: str | None,
        group: AnyGroup | None,
        *,
        wait: bool,
    ) -> PendingSave:
        path = self._path()
        number = _NUMBER.fullmatch(location_text(path).rstrip("/").rpartition("/")[2])
        with registered(names.PieceFramework()):
            return saves.save(
                path,
                names.nested(values, paths, item),
                step=int(number[1]) if self._step is None and number else self._step,
                wait=wait,
                overwrite=self._overwrite,
                metadata={**self._metadata, ITEM: {"item": item}},
                options=self._options,
                group=group,
            )

    def _path(self) -> str | PathLike[str]:
        return required(self.checkpoint_id, "Writer")
