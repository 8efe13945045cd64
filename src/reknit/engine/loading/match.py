"""The match of wanted entries with saved entries, and the list of problems where they do not fit."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from reknit.errors import CorruptError, MismatchError, ReknitError
from reknit.planner.tiling import SHOWN, untiled
from reknit.types.box import Box
from reknit.types.dtype import converts
from reknit.types.shard import Strided, full_name
from reknit.types.small import spelled
from reknit.types.wanted import Terms, matches, reshaping, selects

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

    from reknit.engine.messages import LoadRequest
    from reknit.options import LoadOptions
    from reknit.planner.tiling import Gap
    from reknit.transforms.quantized import Quantized
    from reknit.types.manifest import Index
    from reknit.types.shard import TensorSpec
    from reknit.types.small import Unread
    from reknit.types.wanted import Wanted


_FIRST = {"damaged": 0, "": 1, "quantized": 2}
_MOST_ALIKE = 3
_UNEXPECTED = "saved, but no rank wants it"
_FEW = 16
"""Tensors that are looked at one by one; for more, all rows of the index are."""


class Fill(Struct, frozen=True, gc=False):
    """A wanted box that will be filled: its name, its tensor in the index, and its target."""

    name: str
    tensor: int
    box: Box
    target: Any
    cast: bool


class Problems(Struct, frozen=True):
    """The entries that do not fit, as (item/fqn, reason).

    `damaged` has sentences about the files of the checkpoint.  `refused` has quantized tensors that floats
    are wanted of, as (item/fqn, kind, reason), which no option permits.  `resized` is not a problem: it has,
    by name, the parts that are taken of saved tensors of another shape.
    """

    missing: list[tuple[str, str]]
    mismatched: list[tuple[str, str]]
    resized: dict[str, str]
    damaged: list[str]
    refused: list[tuple[str, str, str]]

    def refuse(self, quantized: Mapping[str, Quantized]) -> None:
        """Move quantized tensors, by name, from the other problems to the refused ones."""
        for problems in (self.missing, self.mismatched):
            problems[:] = [problem for problem in problems if problem[0] not in quantized]
        for name, found in quantized.items():
            at = "" if found.name == name else f" in {found.name}"
            why = f"saved as {found.dtype}{at}, which is a value only together with its scale, {found.scale}"
            self.refused.append((name, found.kind, why))

    def name_unread(self, unread: Iterable[Unread], permitted: Callable[[str], bool]) -> None:
        """Give missing names that reknit cannot read their reason, and add others that are not permitted."""
        reasons = {entry.name: f"saved, but it cannot be read: {entry.why}" for entry in unread}
        covered: set[str] = set()
        for number, (name, _) in enumerate(self.missing):
            places = accumulate(name.split("/"), "{}/{}".format)
            if found := [place for place in places if place in reasons]:
                self.missing[number] = name, reasons[found[-1]]
                covered.update(found)
        others = (name for name in reasons if name not in covered and not permitted(name))
        self.missing.extend((name, reasons[name]) for name in others)


class Problem(Struct, frozen=True):
    """A place in which a checkpoint does not fit: its name or a sentence, the reason, and the ranks.

    Reasons of the same kind are `alike`.
    """

    kind: str
    name: str
    why: str
    alike: str
    ranks: str

    def __str__(self) -> str:
        parts = (part for part in (self.kind, self.name, self.why) if part)
        return ": ".join(parts) + self.ranks


def terms(options: LoadOptions, watched: Sequence[str] = ()) -> Terms:
    """Return the terms of these options for the code that selects the wanted entries."""
    return Terms(tuple(options.only), tuple(options.allow_shape_mismatch), options.cast, tuple(watched))


def strict_patterns(lenient: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of `strict` without ``!``, given the `lenient` patterns of the load."""
    return tuple(dict.fromkeys(name for p in lenient if (name := p.removeprefix("!")) != "*"))


def match(
    index: Index, wanted: Wanted, options: LoadOptions, stored: Mapping[str, str] | None = None
) -> tuple[list[Fill], Problems]:
    """Match wanted shards with saved tensors by name, shape and dtype.

    Pure.  `stored` maps the names of renamed entries to their names in the checkpoint.
    """
    names = stored or {}
    problems = Problems(
        [(full_name(item, fqn), why) for item, fqn, why in wanted.missing],
        [(n := full_name(item, fqn), why + _stored_as(n, names)) for item, fqn, why in wanted.mismatched],
        dict(wanted.resized),
        [],
        [],
    )
    resizable = frozenset(wanted.resizable)
    fills: list[Fill] = []
    ids, tensors = index.ids, index.tensors
    names_here = [f"{shard.item}/{shard.fqn}" if shard.fqn else shard.item for shard in wanted.shards]
    for name, shard in zip(wanted.labels or names_here, wanted.shards, strict=True):
        tensor = ids.get((shard.item, shard.fqn))
        if tensor is None:
            problems.missing.append((name, "not in the checkpoint"))
            continue
        saved, memory = tensors[tensor].spec, shard.memory
        if saved == shard.spec:
            target = memory.view() if type(memory) is Strided else memory
            fills.append(Fill(name, tensor, shard.box, target, cast=False))
            continue
        cast = saved.dtype != shard.spec.dtype
        may = (shard.item, shard.fqn) in resizable or matches(name, options.allow_shape_mismatch)
        if (why := _mismatch(saved, shard.spec, cast=options.cast, resize=may)) is not None:
            problems.mismatched.append((name, why + _stored_as(name, names)))
        elif saved.shape == shard.spec.shape:
            fills.append(Fill(name, tensor, shard.box, shard.data, cast))
        else:
            problems.resized[name] = _resized(saved, shard.spec) + _stored_as(name, names)
            fills += _common(Fill(name, tensor, shard.box, shard.data, cast), saved)
    for name, _ in problems.mismatched:
        problems.resized.pop(name, None)
    return fills, problems


def _mismatch(saved: TensorSpec, wanted: TensorSpec, *, cast: bool, resize: bool) -> str | None:
    """Return the reason why a saved tensor cannot fill a wanted one, or None if it can."""
    if saved.shape != wanted.shape and not (resize and len(saved.shape) == len(wanted.shape)):
        why = f"saved shape {list(saved.shape)}, wanted {list(wanted.shape)}"
        if resize:
            return f"{why}; the number of dimensions may not differ"
        return why + reshaping(wanted.shape) if len(saved.shape) == len(wanted.shape) else why
    if saved.dtype == wanted.dtype:
        return None
    why = f"saved dtype {saved.dtype}, wanted {wanted.dtype}"
    if not converts(saved.dtype, wanted.dtype):
        return f"{why}, which would lose more than rounding does" if cast else why
    return None if cast else f"{why} (LoadOptions(cast=True) converts)"


def _resized(saved: TensorSpec, wanted: TensorSpec) -> str:
    """Describe the part that is taken of a saved tensor of another shape."""
    taken = Box.whole(tuple(map(min, saved.shape, wanted.shape)))
    return f"saved shape {list(saved.shape)}, wanted {list(wanted.shape)}: took {taken}"


def _common(fill: Fill, saved: TensorSpec) -> list[Fill]:
    """Return the fill of the part of a wanted box that a smaller saved tensor has, if any."""
    box = fill.box.intersect(Box.whole(saved.shape))
    if box is None:
        return []
    target = fill.target[box.relative_to(fill.box.offsets).slices()]
    return [structs.replace(fill, box=box, target=target)]


def _stored_as(name: str, stored: Mapping[str, str]) -> str:
    """Return words about the name in the checkpoint of a renamed entry, or nothing."""
    return f" (its name in the checkpoint is {stored[name]})" if name in stored else ""


def uncovered(index: Index, wanted: Container[int]) -> list[str]:
    """Name the wanted tensors that the chunks of the index do not cover exactly."""
    shapes = [entry.spec.shape for entry in index.tensors]
    return [
        _gap_text(index, gap.tensor, gap)
        for gap in untiled(shapes, index.tensor, index.offsets, index.lengths)
        if gap.tensor in wanted
    ]


def require_covered(index: Index, wanted: Collection[int]) -> None:
    """Raise `CorruptError` for a tensor that its chunks do not cover: the rest of it would be any bytes."""
    if len(wanted) > _FEW:
        problems = uncovered(index, frozenset(wanted))
    else:
        problems = [text for number in wanted for text in _uncovered_one(index, number)]
    if problems:
        raise CorruptError(problems[0], remedy="load another checkpoint")


def _uncovered_one(index: Index, number: int) -> list[str]:
    """Return the text of `uncovered` about one tensor, whose rows alone are looked at."""
    rows, shape = slice(*index.first[number : number + 2].tolist()), index.tensors[number].spec.shape
    offsets, lengths = index.offsets[rows], index.lengths[rows]
    gaps = untiled([shape], np.zeros(len(offsets), np.int64), offsets, lengths)
    return [_gap_text(index, number, gap) for gap in gaps]


def _gap_text(index: Index, number: int, gap: Gap) -> str:
    return (
        f"the chunks of {full_name(*index.tensors[number][:2])} in the index do not cover it exactly: they "
        f"hold {gap.held} of {gap.numel} elements"
    )


def require_fit(
    requests: Sequence[LoadRequest],
    unexpected: Sequence[str],
    idle: Sequence[str],
    lenient: Sequence[str],
    url: str,
    *,
    spare: Sequence[str] = (),
    damaged: Sequence[str] = (),
    hint: Callable[[Sequence[str]], str | None] = lambda _: None,
) -> None:
    """Raise one error that lists the problems of all ranks, if there are any.

    `damaged` has sentences of the root.  The error is a `CorruptError` if files are damaged, which no option
    permits, and otherwise a `MismatchError`.  `idle` has lines about patterns that match nothing, which no
    option permits either; those in `spare` only appear beside other problems.  `lenient` has patterns of the
    load; `hint` suggests a fix for missing names.
    """
    found: dict[tuple[str, str, str, str], set[int]] = {}
    for request in requests:
        lines = [("damaged", what, "", "") for what in request.damaged]
        lines += [("quantized", name, why, kind) for name, kind, why in request.refused]
        lines += [("missing", name, why, why) for name, why in request.missing]
        lines += [("mismatched", name, why, why) for name, why in request.mismatched]
        for line in lines:
            found.setdefault(line, set()).add(request.rank)
    everyone = {request.rank for request in requests}
    of_root = {("damaged", what, "", ""): everyone for what in damaged}
    left = [name for name in unexpected if not selects(name, lenient)]
    of_all = {("unexpected", name, _UNEXPECTED, _UNEXPECTED): everyone for name in left}
    problems = [
        Problem(*line, _on(ranks, len(requests))) for line, ranks in {**of_root, **found, **of_all}.items()
    ]
    # Idle patterns come first, since they may be the cause of the other problems, and must not be cut off.
    idle = [*idle, *(spare if problems or idle else ())]
    problems[:0] = [Problem("", line, "", "", "") for line in idle]
    problems.sort(key=lambda problem: _FIRST.get(problem.kind, len(_FIRST)))
    if problems:
        missing = list(dict.fromkeys(name for request in requests for name, _ in request.missing))
        raise _refusal(problems, url, hint(missing))


def _refusal(problems: Sequence[Problem], url: str, hint: str | None) -> ReknitError:
    """Return the error that lists the first problems and counts the others."""
    lines = list(_lines(problems))
    listed = "\n  ".join(lines[:SHOWN]) + (
        f"\n  ... and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    )
    places = f"{len(problems)} place{'' if len(problems) == 1 else 's'}"
    kinds = {problem.kind for problem in problems}
    if "damaged" in kinds:
        return CorruptError(
            f"the checkpoint is damaged, or does not fit the target, in {places}; nothing was "
            f"changed:\n  {listed}",
            path=url,
            remedy="restore the files that are damaged, or load another checkpoint",
        )
    remedy = (
        "mend the names or shapes, load fewer items, or pass the option that a line names; "
        "reknit.load(..., strict=False) (or patterns, as in strict=['!model/head.*']) leaves out all entries "
        "that do not fit, and reports them"
    )
    if "quantized" in kinds:
        remedy = (
            "load quantized tensors into tensors of their dtype, which a model that is quantized in the same "
            f"way has, or read them as they are, with their scales: reknit.open({url!r}).read_all(); no "
            "option loads them as floats"
        )
    elif hint is not None:
        remedy = f"{hint}\n  -> otherwise {remedy}"
    return MismatchError(
        f"the checkpoint does not fit the target in {places}; nothing was changed:\n  {listed}",
        path=url,
        remedy=remedy,
    )


def _lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a line for each problem, but one line for more than a few problems of the same reason."""
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        alike.setdefault((problem.kind, problem.alike or problem.name, problem.ranks), []).append(problem)
    for each in alike.values():
        first = each[0]
        if len(each) <= _MOST_ALIKE:
            yield from map(str, each)
        else:
            names = ", ".join(problem.name for problem in each[:_MOST_ALIKE])
            yield str(structs.replace(first, name=f"{names} and {len(each) - _MOST_ALIKE} more"))


def _on(ranks: set[int], size: int) -> str:
    """Return words that name the ranks with a problem, or nothing if all ranks have it."""
    if len(ranks) == size:
        return ""
    return f" ({spelled(ranks)})"
