"""An open checkpoint: its names and specs, and reading any part of any tensor."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reknit.engine.loading.match import require_covered
from reknit.engine.loading.read import RangeReader
from reknit.engine.memory.workers import within
from reknit.engine.reports import Shown
from reknit.engine.stored.file_checks import check_size
from reknit.engine.stored.opening import OpenCheckpoint, opened, read_opened, unknown_items
from reknit.engine.stored.renaming import Naming
from reknit.errors import FormatError, MismatchError, UsageError, did_you_mean, typed_known
from reknit.events.progress import amount
from reknit.keywords import checked_call
from reknit.types.box import Box
from reknit.types.shard import GENERATOR, TensorSpec, full_name
from reknit.types.wanted import matches, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.events.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

Index = int | slice | EllipsisType
"""Selects along one dimension, or with an ellipsis along all remaining dimensions."""


class NewArrays(Protocol):
    """Makes new arrays of a framework, and restores the types of saved values."""

    def fresh(
        self, item: str, fqn: str, spec: TensorSpec, framework: str, device: Any, *, sharding: Any
    ) -> Any:
        """Return a new `tensor`, with its `parts`: boxes, and the memory of each box."""

    def filled(self, tensor: Any, generator: str | None = None) -> Any:
        """Return the array that a new tensor has become; typed keys, if a generator is named."""

    def live(self, value: Any, fqn: str, tensors: Mapping[str, Any]) -> Any:
        """Return a saved value in its original types, with the tensors to which it refers."""


@checked_call
class Checkpoint(Shown):
    """An open checkpoint.  It holds metadata only; every `read` goes to storage, and is verified.

    `items` are the top-level names, `tensors[item][fqn]` the spec of each tensor, `values[item][fqn]` the
    other values, if they are the same for all ranks, `manifest` the commit record.
    """

    def __init__(
        self,
        storage: Storage,
        options: LoadOptions,
        recorder: Recorder,
        arrays: NewArrays,
        replicas: Sequence[Storage] = (),
    ) -> None:
        own = Naming.of(options) is not None
        with recorder.phase("open"):
            contents = within(
                options.timeout_s,
                lambda: f"reading manifest and index of {storage.url}",
                lambda: read_opened(storage, None, own=own, replicas=replicas, most_kept=0),
            )
            self._open: OpenCheckpoint = opened(storage, contents, None, options, replicas)
        self._options = options
        self._recorder = recorder
        self._arrays = arrays
        catalog = self._open.catalog()
        self.items: tuple[str, ...] = catalog.items
        self.tensors: Mapping[str, Mapping[str, TensorSpec]] = catalog.tensors
        self.values: Mapping[str, Mapping[str, Any]] = catalog.blobs

    def _facts(self) -> dict[str, object]:
        return {
            "path": self._open.storage.url,
            "step": self.step,
            "size": amount(self.manifest.nbytes),
            "items": ", ".join(
                f"{item} ({len(self.tensors[item])} tensors, {len(self.values[item])} values)"
                for item in self.items
            ),
        }

    @property
    def manifest(self) -> Manifest:
        """The commit record."""
        return self._open.manifest

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata that the user stored beside the state."""
        return self._open.manifest.metadata

    @property
    def step(self) -> int | None:
        """The training step, or None."""
        return self._open.manifest.step

    def close(self) -> None:
        """Release the resources of the store; a later `read` opens it again."""
        for storage in (self._open.storage, *self._open.replicas):
            storage.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @typed_known()
    def read(
        self, item: str, fqn: str, index: Sequence[Index] | Index = ..., *, framework: str = "numpy"
    ) -> Any:
        """Read a tensor, or the part of it that `index` selects, from the files that hold it.

        `index` is as for an array: integers, slices of step 1, and one ellipsis.  `framework` is ``"numpy"``
        (bfloat16 and float8 come as ml_dtypes types), ``"torch"`` or ``"jax"``.  Raises `MismatchError` for
        an unknown name.
        """
        number = self._open.index.ids.get((item, fqn))
        if number is None:
            raise self._unread(item, fqn) or self._unknown(item, fqn)
        spec = self.tensors[item][fqn]
        box, kept = selected(spec.shape, index)
        part = TensorSpec(box.lengths, spec.dtype)
        parts = self._arrays.fresh(item, fqn, part, framework, None, sharding=None)
        self._fill([(number, Box(box.offsets, inner.lengths), memory) for inner, memory in parts.parts])
        return self._arrays.filled(parts.tensor).reshape(kept)

    def _unread(self, item: str, fqn: str) -> FormatError | None:
        """Return the error of an entry that another program wrote and reknit cannot read; None for others."""
        name = full_name(item, fqn)
        for entry in self.manifest.unread:
            if entry.covers(name):
                return FormatError(
                    f"{name!r} cannot be read: {entry.why}",
                    path=self._open.storage.url,
                    remedy="read it with the program that saved it; all other entries can be read here",
                )
        return None

    def _unknown(self, item: str, fqn: str) -> MismatchError:
        """Return the error of a name that no tensor has."""
        url = self._open.storage.url
        if item not in self.items:
            return unknown_items([item], self.items, self._open.manifest, url)
        remedy = "`tensors` lists its tensors; `reknit show` does on a terminal"
        if fqn in self.values[item]:
            remedy = "it is a value and no tensor: look in `values`"
        elif question := did_you_mean(fqn, self.tensors[item]):
            remedy = f"{question}  {remedy}"
        return MismatchError(
            f"the checkpoint has no tensor {fqn!r} in item {item!r}", path=url, remedy=remedy
        )

    @typed_known()
    def read_all(
        self,
        items: Sequence[str] | None = None,
        *,
        only: Sequence[str] = (),
        framework: str = "torch",
        device: Any = None,
        sharding: Any = None,
    ) -> dict[str, dict[str, Any]]:
        """Read all of some items into new memory: ``{item: {fqn: tensor or value}}``.

        An item that was a module becomes a state dict for ``load_state_dict(..., assign=True)``.  All tensors
        are read together, in one plan; beside the result this takes the memory of
        `LoadOptions.inflight_nbytes` only.  Tensors that were tied (stored once) are one object again, unless
        `sharding` differs by name.  An object that was saved by its `state_dict` has its tensors under their
        names, and under ``~s`` the dict with the tensors in it; an item that is itself a tensor or a value is
        under the empty name.  Values that ranks saved for themselves are not among the values.

        `items` are names, default all.  `only` are patterns (``fnmatch``) of names ``item/fqn`` to read.
        `framework` is ``"torch"``, ``"numpy"`` or ``"jax"``, for which typed keys are keys, and `device` and
        `sharding` are those of JAX.  `device`: where torch tensors are made, such as
        ``"cuda"``; default the CPU.  `sharding`: a pair of a `DeviceMesh` and placements, a mapping of names
        to such pairs, or a function of name and shape that returns one; then the tensors are DTensors on the
        mesh's device, and each rank reads its own part only.  A placement that cuts a dimension which a
        tensor does not have counts as `Replicate`, a tensor without a pair is whole and plain.

        Raises `MismatchError` for a missing item and for a pattern that matches nothing, and `UsageError` for
        wrong arguments.
        """
        names = self._chosen(items, only)
        entries = [self._open.index.tensors[number] for number in names.tensors]
        made: dict[object, Any] = {}
        tensors: dict[tuple[str, str], Any] = {}
        fills: list[tuple[int, Box, Any]] = []
        one_layout = sharding is None or isinstance(sharding, tuple)
        for number, (item, fqn, spec) in zip(names.tensors, entries, strict=True):
            tied = self._extents(number) if one_layout and spec.nbytes else number
            if tied not in made:
                made[tied] = self._arrays.fresh(item, fqn, spec, framework, device, sharding=sharding)
                fills += [(number, box, memory) for box, memory in made[tied].parts]
            tensors[item, fqn] = made[tied].tensor
        self._fill(fills)
        result: dict[str, dict[str, Any]] = {item: {} for item in names.items}
        whole = {id(tensor): self._filled(*name, tensor) for name, tensor in tensors.items()}
        for (item, fqn), tensor in tensors.items():
            result[item][fqn] = whole[id(tensor)]
        for item, fqn in names.values:
            # Values refer only to tensors of their own item, which are all in the result.
            result[item][fqn] = self._arrays.live(self.values[item][fqn], fqn, result[item])
        return result

    def _filled(self, item: str, fqn: str, tensor: Any) -> Any:
        """Return a tensor that was read; for JAX, with the generator of its keys."""
        generator = self.values[item].get(f"{fqn}/{GENERATOR}" if fqn else GENERATOR)
        return self._arrays.filled(tensor, generator if isinstance(generator, str) else None)

    def _chosen(self, items: Sequence[str] | None, only: Sequence[str]) -> _Selection:
        """Return the entries to read of the checkpoint, by item, name and pattern."""
        if isinstance(items, str) or isinstance(only, str):
            raise UsageError("items and only are lists of texts: put the text into a list")
        wanted = self.items if items is None else tuple(dict.fromkeys(items))
        url = self._open.storage.url
        if absent := [item for item in wanted if item not in self.items]:
            raise unknown_items(absent, self.items, self._open.manifest, url)
        tensors = [(item, fqn) for item in wanted for fqn in self.tensors[item]]
        values = [(item, fqn) for item in wanted for fqn in self.values[item]]
        if only:
            known = [full_name(*name) for name in (*tensors, *values)]
            for pattern in only:
                if not any(matches(name, [pattern]) for name in known):
                    near = suggest(pattern, known)
                    raise MismatchError(
                        f"only has the pattern {pattern!r}, which matches nothing in the items read",
                        path=url,
                        remedy=f"{near}  names are item/fqn; `reknit show` lists them",
                    )
            tensors = [name for name in tensors if matches(full_name(*name), only)]
            values = [name for name in values if matches(full_name(*name), only)]
        return _Selection(wanted, [self._open.index.ids[name] for name in tensors], values)

    def _extents(self, number: int) -> object:
        """Return the place of a tensor in the files, which is equal for tied tensors."""
        index = self._open.index
        rows = slice(*index.first[number : number + 2].tolist())
        return index.tensors[number].spec, index.file[rows].tobytes(), index.start[rows].tobytes()

    def _fill(self, fills: Sequence[tuple[int, Box, Any]]) -> None:
        """Read boxes of tensors, given by number, into their memory."""
        checkpoint = self._open
        require_covered(checkpoint.index, {number for number, _, _ in fills})

        def read(source: Storage) -> None:
            reader = RangeReader(checkpoint, fills, self._options)
            for file in reader.plan.files:
                check_size(source, checkpoint.files[checkpoint.index.files[file]], checkpoint.replicas)
            reader.run(self._recorder, self._options.timeout_s)

        checkpoint.read(read)


class _Selection(NamedTuple):
    """Items, the numbers of their tensors, and the names of their values."""

    items: tuple[str, ...]
    tensors: list[int]
    values: list[tuple[str, str]]


def selected(shape: Sequence[int], index: Sequence[Index] | Index) -> tuple[Box, tuple[int, ...]]:
    """Return the box that an index selects, and the shape of the result (integers drop their dimension)."""
    parts: list[Any] = list(index) if isinstance(index, tuple | list) else [index]
    if parts.count(...) > 1:
        raise UsageError("an index has at most one ellipsis")
    given = len(parts) - parts.count(...)
    if given > len(shape):
        raise UsageError(f"{given} indices for a tensor of {len(shape)} dimensions")
    fill = [slice(None)] * (len(shape) - given)
    place = parts.index(...) if ... in parts else len(parts)
    full = [*parts[:place], *fill, *parts[place + 1 :]]
    offsets: list[int] = []
    lengths: list[int] = []
    kept: list[int] = []
    for size, part in zip(shape, full, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step != 1:
                raise UsageError(f"slices have step 1 here, not {step}")
            offsets.append(start)
            lengths.append(max(stop - start, 0))
            kept.append(lengths[-1])
            continue
        try:
            number = operator.index(part)
        except TypeError:
            raise UsageError(
                f"an index is an integer, a slice or ..., not {part!r}", remedy="read more, and index that"
            ) from None
        at = number + size if number < 0 else number
        if not 0 <= at < size:
            raise IndexError(f"index {part} is outside a dimension of {size}")
        offsets.append(at)
        lengths.append(1)
    return Box(tuple(offsets), tuple(lengths)), tuple(kept)
