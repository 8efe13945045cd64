"""How does `dcp.load` read a checkpoint of reknit?  By a storage reader that loads the planner's state."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from reknit import ranks, stored
from reknit.api import loads
from reknit.errors import MismatchError, UsageError
from reknit.frameworks.custom import registered
from reknit.frameworks.neutral import from_neutral
from reknit.integrations.torch_dcp import names
from reknit.locations import location_text
from reknit.options import LoadOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

    from reknit.ranks import AnyGroup

ITEM = "dcp"
"""The entry of a checkpoint's metadata that names the item of the entries without levels."""

RAW = "~bytes"
"""The key of bytes that a planner of the user made of an entry."""

PLANS = ("create_local_plan", "create_global_plan", "finish_plan")
_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor", "load_bytes")


class DcpReader(StorageReader):
    """The storage reader for `dcp.load`: any checkpoint of reknit, of any layout and number of ranks.

    A name of DCP is the item and the name in it, with dots: ``model.layers.0.weight``.  With `item` the names
    of that item are without it, as in ``model.state_dict()``; by default that is the item of a `Writer`.
    Tensors are converted to the dtype of the target.  The other arguments are those of `reknit.load`.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        item: str | None = None,
        options: LoadOptions | None = None,
        group: AnyGroup | None = None,
    ) -> None:
        self.checkpoint_id, self._given, self._group = path, item, group
        self._options = LoadOptions(cast=True) if options is None else options
        self._item: str | None = None
        self._entries: dict[str, names.Entry] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether this is a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Take the path of the next checkpoint."""
        self.checkpoint_id = self.checkpoint_id if checkpoint_id is None else checkpoint_id

    def read_metadata(self) -> Metadata:
        """Return the names and specs of the checkpoint."""
        with stored.open(self._path()) as checkpoint:
            own = checkpoint.metadata.get(ITEM)
            self._item = (own or {}).get("item") if self._given is None else self._given
            self._entries = names.entries_of(checkpoint, self._item)
            return names.metadata_of(checkpoint, self._entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: `read_metadata` comes first."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: reknit makes its own."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Record in each plan the number of ranks, and whether any of them reads a tensor."""
        reads = [read for plan in plans for read in plan.items]
        any_tensor = any(read.type == LoadItemType.TENSOR or not self._is_value(read) for read in reads)
        return [replace(plan, storage_data=(len(plans), any_tensor)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        """Load the entries of the plan together with the other ranks."""
        num_ranks, any_tensor = plan.storage_data or (None, True)
        group = group_of(self._group, num_ranks)
        if overrides(planner, DefaultLoadPlanner, (*PLANS, *_HOOKS)) or not any_tensor:
            self._load_pieces(plan, planner, group, any_tensor=any_tensor)
        else:
            self._load_state(plan, planner, group)
        return done(None)

    def _load_state(self, plan: LoadPlan, planner: Any, group: AnyGroup | None) -> None:
        """Fill the state dict of DCP's own planner as reknit fills a state."""
        known, paths = planner.metadata.state_dict_metadata, planner.mappings
        values = {
            name: "" if isinstance(value, BytesStorageMetadata | io.BytesIO) else value
            for name, value in planner.state_dict.items()
            if name in known
        }
        state = names.nested(values, paths, self._item)
        self._load(state, group)
        for read in plan.items:
            if read.type == LoadItemType.BYTE_IO:
                path = paths.get(read.dest_index.fqn, (read.dest_index.fqn,))
                value = names.found(state, names.placed(path, self._item))
                if isinstance(value, dict) and RAW in value:
                    raise self._foreign(read.dest_index.fqn)
                names.put(planner.original_state_dict, path, value)

    def _load_pieces(self, plan: LoadPlan, planner: Any, group: AnyGroup | None, *, any_tensor: bool) -> None:
        """Give a planner the entries that its plan names."""
        pieces: dict[str, names.PlannedPieces] = {}
        filled: list[tuple[Any, torch.Tensor]] = []
        for read in plan.items:
            if read.type == LoadItemType.BYTE_IO:
                continue
            name = read.storage_index.fqn
            spec = self._entries[name].spec
            if (refused := names.misplaced(planner, read.dest_index.fqn)) is not None:
                pieces[name] = names.PlannedPieces(refused=refused)
                continue
            target = planner.resolve_tensor(read).detach()
            if spec is not None:
                pieces.setdefault(name, names.PlannedPieces()).add(spec.shape, read.storage_offsets, target)
            filled.append((read, target))
        if any_tensor:
            paths = {name: entry.path for name, entry in self._entries.items()}
            with registered(names.PieceFramework()):
                self._load(names.nested(pieces, paths, self._item), group)
        for read, target in filled:
            planner.commit_tensor(read, target)
        self._give_values(plan, planner)

    def _give_values(self, plan: LoadPlan, planner: Any) -> None:
        """Give a planner the values of its plan as bytes, which it decodes."""
        reads = [read for read in plan.items if read.type == LoadItemType.BYTE_IO]
        if not reads:
            return
        own_bytes = bool(overrides(planner, DefaultLoadPlanner, ("load_bytes",)))
        with stored.open(self._path()) as checkpoint:
            for read in reads:
                name = read.storage_index.fqn
                entry = self._entries.get(name)
                if entry is None or entry.fqn not in checkpoint.values[entry.item]:
                    raise MismatchError(
                        f"{name} is not one value in the checkpoint",
                        path=location_text(self._path()),
                        remedy="load it with DCP's own planner, together with the tensors beside it",
                    )
                value = names.live(from_neutral(checkpoint.values[entry.item][entry.fqn]))
                if isinstance(value, dict) and RAW in value:
                    if not own_bytes:
                        raise self._foreign(name)
                    planner.load_bytes(read, io.BytesIO(value[RAW]))
                    continue
                buffer = io.BytesIO()  # in memory only: no checkpoint has pickled bytes of it
                torch.save(value, buffer)
                buffer.seek(0)
                planner.load_bytes(read, buffer)

    def _is_value(self, read: ReadItem) -> bool:
        """Return whether the checkpoint has this entry as one value, without tensors in it."""
        entry = self._entries.get(read.storage_index.fqn)
        return entry is not None and entry.spec is None

    def _load(self, state: dict[str, Any], group: AnyGroup | None) -> None:
        """Load all entries of a state; DCP accepts further entries of the checkpoint."""
        report = loads.load(self._path(), state, strict=False, options=self._options, group=group)
        wrong = [f"{name}: {why}" for name, why in report.mismatched.items()]
        wrong += [
            f"{name}: {report.notes.get(name, 'the checkpoint does not have it for this rank')}"
            for name in report.missing
        ]
        if wrong:
            raise MismatchError(
                "entries of the state dict were not loaded:\n  " + "\n  ".join(wrong),
                path=report.path,
                remedy="leave them out of the state dict, or mend their names, shapes or dtypes",
            )

    def _foreign(self, name: str) -> MismatchError:
        return MismatchError(
            f"{name} was encoded by a planner with a format of its own",
            path=location_text(self._path()),
            remedy="load it with the planner that decodes it in load_bytes",
        )

    def _path(self) -> str | PathLike[str]:
        return required(self.checkpoint_id, "Reader")


def overrides(planner: Any, base: type[Any], hooks: Sequence[str]) -> list[str]:
    """Return the hooks that a planner has of its own, and not from DCP's own planner."""
    kind = type(planner)
    return [hook for hook in hooks if getattr(kind, hook, None) is not getattr(base, hook)]


def required(path: str | PathLike[str] | None, what: str) -> str | PathLike[str]:
    """Return the path of a checkpoint.  Raises `UsageError` if the user named none."""
    if path is None:
        raise UsageError(f"{what} has no path", remedy=f"write {what}(path), or pass checkpoint_id")
    return path


def group_of(given: AnyGroup | None, num_ranks: int | None) -> AnyGroup | None:
    """Return the ranks of a call of DCP, of which its storage receives the number only."""
    if given is not None or num_ranks is None:
        return given
    if not dist.is_initialized():
        return ranks.alone()
    if num_ranks == dist.get_world_size():
        return None
    if num_ranks == 1:
        return ranks.alone()
    raise UsageError(
        f"this call of DCP has a process_group of {num_ranks} ranks, which it does not pass on",
        remedy="pass the same process group to Writer or Reader, as group=",
    )


def done(value: Any) -> Any:
    """Return a future that is done, as DCP waits for one."""
    future: Any = Future()
    future.set_result(value)
    return future
