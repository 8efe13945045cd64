"""A checkpoint as a thing to look into: names, specs, and any part of any tensor."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from reknit.engine.opening import OpenCheckpoint, check_size, opened, read_opened
from reknit.engine.read import Reader, granularity
from reknit.errors import MismatchError, UsageError
from reknit.planner.load import plan_load
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest
    from reknit.types.shard import TensorSpec

Index = int | slice | EllipsisType
"""What selects along one dimension, or along all that are not named."""


class Checkpoint:
    """An open checkpoint.  It holds metadata only; every `read` goes to storage, and is verified.

    `items` are the top-level names, `tensors[item][fqn]` the spec of each tensor, `values[item][fqn]` what is
    no tensor and the same for all ranks, `manifest` the commit record.
    """

    def __init__(
        self,
        storage: Storage,
        options: LoadOptions,
        recorder: Recorder,
        empty: Callable[[Sequence[int], str, str], Any],
    ) -> None:
        with recorder.phase("open"):
            message = read_opened(storage, None)
            self._open: OpenCheckpoint = opened(storage, message, None, allow_pickle=options.allow_pickle)
        self._options = options
        self._recorder = recorder
        self._empty = empty
        catalog = self._open.catalog()
        self.items: tuple[str, ...] = catalog.items
        self.tensors: Mapping[str, Mapping[str, TensorSpec]] = catalog.tensors
        self.values: Mapping[str, Mapping[str, Any]] = catalog.blobs

    @property
    def manifest(self) -> Manifest:
        """The commit record."""
        return self._open.manifest

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user stored beside the state."""
        return self._open.manifest.metadata

    @property
    def step(self) -> int | None:
        """The training step, where one was given."""
        return self._open.manifest.step

    def close(self) -> None:
        """Release what the store holds open; a later `read` opens it again."""
        self._open.storage.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self, item: str, fqn: str, index: Sequence[Index] | Index = ..., *, framework: str = "numpy"
    ) -> Any:
        """Read a tensor, or the part of it that `index` selects, from whatever files hold it.

        `index` is as for an array: integers, slices of step 1, and one ellipsis.  `framework` is ``"numpy"``
        (bfloat16 and float8 come as ml_dtypes types) or ``"torch"``.  Raises `MismatchError` for an unknown
        name.
        """
        number = self._open.index.ids.get((item, fqn))
        if number is None:
            raise MismatchError(
                f"the checkpoint has no tensor {fqn!r} in item {item!r}",
                path=self._open.storage.url,
                remedy="`tensors` lists what it has; `reknit show` does on a terminal",
            )
        spec = self.tensors[item][fqn]
        box, kept = selected(spec.shape, index)
        array = self._empty(box.lengths, spec.dtype, framework)
        cut = granularity(self._options, self.manifest.block_nbytes)
        sizes = [self._open.files[path].nbytes for path in self._open.index.files]
        plan = plan_load(self._open.index, [(number, box)], sizes, cut)
        for file in sorted(set(plan.read_file.tolist())):
            check_size(self._open.storage, self._open.files[self._open.index.files[file]])
        Reader(self._open, plan, [array], [number], frozenset(), self._options).run(self._recorder)
        return array.reshape(kept)


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
