"""A checkpoint under other names and in other cuts: what it offers, and where what is wanted of that lies.

Nothing is copied.  What a rank wants of a target becomes what it wants of the sources, with views of the same
memory, so that only the bytes needed are read, and the rest of a load knows nothing of transforms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from reknit.errors import MismatchError
from reknit.transforms.base import Binding, Made, Piece
from reknit.types.box import Box
from reknit.types.dtype import converts, numpy_dtype
from reknit.types.shard import Shard, TensorSpec, full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reknit.transforms.base import Rule, Shape
    from reknit.types.manifest import Catalog
    from reknit.types.wanted import Wanted

Name = tuple[str, str]
"""Item and FQN."""

_OPTIONS = re.compile(r"((?:.*/)?)param_groups/([^/]+)")
_STATE = re.compile(r"state/([^/]+)(/.+)")


class _Family(NamedTuple):
    """Names that differ in the parameter only: the parameters themselves, one of their states, or options."""

    item: str
    prefix: str
    suffix: str

    def name(self, parameter: str) -> Name:
        return self.item, f"{self.prefix}{parameter}{self.suffix}"


class _SourcePart(NamedTuple):
    """What a target is made of, and how."""

    made: Made
    names: tuple[Name, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class _Step:
    """What one rule makes: tensors and values by their new names, of others by the names before."""

    tensors: dict[Name, _SourcePart]
    values: dict[Name, tuple[Name, ...]]
    dropped: set[Name]


@dataclass
class _Equal:
    """Counters that several tensors become one of, which must be the same."""

    told: str
    names: tuple[str, ...]
    values: list[Any] = field(default_factory=list)

    def check(self) -> None:
        for name, value in zip(self.names[1:], self.values[1:], strict=True):
            if value.tobytes() != self.values[0].tobytes():
                raise MismatchError(
                    f"{self.told} is to be made of {self.names[0]} and {name}, which are "
                    f"{self.values[0].item()} and {value.item()}",
                    remedy="load without this state: give `only` or `lenient` patterns",
                )


@dataclass
class Transformed:
    """What a checkpoint offers after all rules; `catalog` has the names, shapes and values of the state."""

    catalog: Catalog
    _steps: list[_Step]
    _specs: dict[Name, TensorSpec]

    @classmethod
    def of(cls, rules: Sequence[Rule], catalog: Catalog) -> Transformed:
        """Apply the rules, one after the other.

        Raises `MismatchError` for a rule that matches nothing, that is not for what it matches, or that gives
        two things one name.
        """
        tensors = {(item, fqn): spec for item, all_ in catalog.tensors.items() for fqn, spec in all_.items()}
        values = {(item, fqn): value for item, all_ in catalog.blobs.items() for fqn, value in all_.items()}
        specs, steps = dict(tensors), []
        for rule in rules:
            steps.append(_apply(rule, tensors, values))
        offered: dict[str, dict[str, TensorSpec]] = {item: {} for item in catalog.tensors}
        for (item, fqn), spec in sorted(tensors.items(), key=lambda entry: entry[0]):
            offered[item][fqn] = spec
        blobs: dict[str, dict[str, Any]] = {item: {} for item in catalog.blobs}
        for (item, fqn), value in values.items():
            blobs[item][fqn] = value
        return cls(replace(catalog, tensors=offered, blobs=blobs), steps, specs)

    def back(self, wanted: Wanted) -> Wanted:
        """Return what is wanted in terms of the checkpoint itself."""
        shards: list[Shard] = []
        told: list[str] = []
        taken: dict[Name, None] = {}
        checks: dict[str, _Equal] = {}
        blanks: list[Any] = []
        resized: dict[str, str] = {}
        for whole in wanted.shards:
            shard, name = self._clipped(whole), full_name(whole.item, whole.fqn)
            if shard.spec.shape != whole.spec.shape:
                resized[name] = _resized(shard.spec.shape, whole.spec.shape)
            for one in self._back(shard, len(self._steps), checks, blanks):
                shards.append(one)
                told.append(name)
                taken[one.item, one.fqn] = None
        for entry in (*(alias[:2] for alias in wanted.aliases), *wanted.superseded):
            taken.update(dict.fromkeys(self._origins(entry, tensors=True)))
        for depth, step in enumerate(self._steps):
            for entry in step.dropped:
                taken.update(dict.fromkeys(self._origins(entry, tensors=True, depth=depth)))
                taken.update(dict.fromkeys(self._origins(entry, tensors=False, depth=depth)))
        blobs = dict.fromkeys(one for entry in wanted.blobs for one in self._origins(entry, tensors=False))

        def deliver() -> None:
            for check in checks.values():
                check.check()
            for blank in blanks:
                blank[...] = 0
            wanted.deliver()

        return replace(
            wanted,
            shards=tuple(shards),
            told=tuple(told),
            aliases=tuple(alias for alias in wanted.aliases if not self._is_made(alias)),
            mismatched=wanted.mismatched + tuple(self._untold(wanted.aliases)),
            resized=tuple(resized.items()),
            superseded=tuple(taken),
            blobs=tuple(blobs),
            deliver=deliver,
        )

    def _is_made(self, alias: tuple[str, str, str, str]) -> bool:
        """Tell whether a rule made one of two tensors that are one in the target."""
        return any(name in step.tensors for step in self._steps for name in (alias[:2], alias[2:]))

    def _untold(self, aliases: Iterable[tuple[str, str, str, str]]) -> Iterator[tuple[str, str, str]]:
        """Yield those of which rules made one, of something else: whether they are equal is not known."""
        for item, fqn, *of in filter(self._is_made, aliases):
            tied = (of[0], of[1])
            if self.origins((item, fqn)) != self.origins(tied):
                name = full_name(*tied)
                yield (
                    item,
                    fqn,
                    f"it is the same tensor as {name} in the target, and rules make it of another",
                )

    @property
    def made(self) -> list[Name]:
        """Names of the tensors that rules made, in an order that is the same wherever an item is known."""
        made = {name for step in self._steps for name in step.tensors}
        every = ((item, fqn) for item, all_ in self.catalog.tensors.items() for fqn in all_)
        return [name for name in every if name in made]

    def origins(self, name: Name) -> list[Name]:
        """Return the names in the checkpoint of all tensors that a tensor is made of."""
        return self._origins(name, tensors=True)

    def _clipped(self, shard: Shard) -> Shard:
        """Return the part of a shard that is in what the checkpoint offers, where that is made by a rule."""
        name = (shard.item, shard.fqn)
        if not any(name in step.tensors for step in self._steps):
            return shard
        spec = TensorSpec(self.catalog.tensors[shard.item][shard.fqn].shape, shard.spec.dtype)
        whole = Box.whole(spec.shape)
        box = shard.box.intersect(whole) or Box(shard.box.offsets, (0,) * whole.ndim)
        if spec == shard.spec or box == shard.box:
            return structs.replace(shard, spec=spec)
        data = shard.data[box.relative_to(shard.box.offsets).slices()]
        return structs.replace(shard, spec=spec, box=box, memory=data)

    def _back(
        self, shard: Shard, depth: int, checks: dict[str, _Equal], blanks: list[Any]
    ) -> Iterator[Shard]:
        """Yield what a shard is of the names before `depth` rules were applied."""
        name = (shard.item, shard.fqn)
        while depth and name not in self._steps[depth - 1].tensors:
            depth -= 1
        if not depth:
            yield shard
            return
        source = self._steps[depth - 1].tensors[name]
        if not source.made.shape and len(source.names) > 1:
            yield from self._equal(shard, source.names, depth, checks, blanks)
            return
        for blank in source.made.blank if self._comes(shard, depth) else ():
            if (common := shard.box.intersect(blank)) is not None:
                blanks.append(shard.data[common.relative_to(shard.box.offsets).slices()])
        for piece in source.made.pieces:
            part = _part(shard, piece, source)
            if part is not None:
                yield from self._back(part, depth - 1, checks, blanks)

    def _equal(
        self,
        shard: Shard,
        sources: tuple[Name, ...],
        depth: int,
        checks: dict[str, _Equal],
        blanks: list[Any],
    ) -> Iterator[Shard]:
        """Yield the sources of a counter: the first goes to where it is wanted, and all to be compared."""
        told = full_name(shard.item, shard.fqn)
        item, fqn = sources[0]
        yield from self._back(structs.replace(shard, item=item, fqn=fqn), depth - 1, checks, blanks)
        if told in checks:
            return
        checks[told] = _Equal(told, tuple(full_name(*name) for name in sources))
        for item, fqn in sources:
            dtype = self._dtype((item, fqn), depth - 1)
            value = np.zeros((), numpy_dtype(dtype))
            checks[told].values.append(value)
            one = Shard(item, fqn, TensorSpec((), dtype), shard.box, shard.replicas, value)
            yield from self._back(one, depth - 1, checks, blanks)

    def _comes(self, shard: Shard, depth: int) -> bool:
        """Tell whether a shard is filled: a lenient load leaves those of which the dtype does not fit."""
        saved = self._dtype((shard.item, shard.fqn), depth)
        return saved == shard.spec.dtype or (self.catalog.terms.cast and converts(saved, shard.spec.dtype))

    def _dtype(self, name: Name, depth: int) -> str:
        """Return the dtype of a tensor in the checkpoint, by a name that it has after `depth` rules."""
        return self._specs[self._origins(name, tensors=True, depth=depth)[0]].dtype

    def _origins(self, name: Name, *, tensors: bool, depth: int | None = None) -> list[Name]:
        """Return the names in the checkpoint of all that something is made of."""
        names = [name]
        for step in reversed(self._steps[:depth]):
            known: Callable[[Name], Iterable[Name]] = (
                (lambda one, step=step: step.tensors[one].names if one in step.tensors else (one,))  # type: ignore[misc]
                if tensors
                else (lambda one, step=step: step.values.get(one, (one,)))  # type: ignore[misc]
            )
            names = [origin for one in names for origin in known(one)]
        return names


def _resized(made: Shape, wanted: Shape) -> str:
    """Say what is taken of a tensor that has another shape."""
    taken = Box.whole(tuple(map(min, made, wanted)))
    return f"transforms make shape {list(made)} of what was saved, wanted {list(wanted)}: took {taken}"


def _part(shard: Shard, piece: Piece, source: _SourcePart) -> Shard | None:
    """Return what a shard is of a source, through one piece, if that has any of it."""
    common = shard.box.intersect(piece.target_box)
    if common is None and not (shard.box.numel or piece.target_box.numel):
        common = shard.box  # a tensor without elements
    if common is None:
        return None
    skipped = common.relative_to(piece.target_box.offsets).offsets
    offsets, lengths = list(piece.source_box.offsets), list(piece.source_box.lengths)
    for d, axis in enumerate(piece.axes):
        if axis is not None:
            offsets[d] += skipped[axis]
            lengths[d] = common.lengths[axis]
    data = shard.data
    if common != shard.box:
        data = data[common.relative_to(shard.box.offsets).slices()]
    kept = [axis for axis in piece.axes if axis is not None]
    order = kept + [axis for axis in range(common.ndim) if axis not in kept]
    if order != sorted(order):
        data = data.permute(order) if hasattr(data, "permute") else data.transpose(order)
    if tuple(data.shape) != tuple(lengths):
        data = data.reshape(tuple(lengths))  # a view: only dimensions of length 1 come and go
    item, fqn = source.names[piece.source]
    spec = TensorSpec(source.shapes[piece.source], shard.spec.dtype)
    return Shard(item, fqn, spec, Box(tuple(offsets), tuple(lengths)), shard.replicas, data)


def _apply(rule: Rule, tensors: dict[Name, TensorSpec], values: dict[Name, Any]) -> _Step:
    """Apply a rule to all names, in place."""
    families = _families(tensors, values)
    bindings = rule.bind(_parameters(families, tensors))
    if not bindings and not rule.optional:
        raise MismatchError(
            f"the transform {rule} matches no name in the checkpoint",
            remedy="templates are for names as `reknit show` lists them, without the item",
        )
    step = _Step({}, {}, set())
    specs: dict[Name, TensorSpec] = {}
    gone: set[Name] = set()
    for binding in bindings:
        for family, members in families.items():
            if any(source in members for source in binding.sources):
                names = tuple(family.name(source) for source in binding.sources)
                _require_whole(rule, family, binding, members)
                if names[0] in tensors:
                    specs |= _make(rule, binding, family, names, tensors, step)
                else:
                    _take_over(binding, family, names, values, step)
                gone.update(names)
                step.dropped.update(() if binding.targets else names)
    fresh = {name: values[names[0]] for name, names in step.values.items()}
    if not rule.keeps:
        for name in gone:
            tensors.pop(name, None)
            values.pop(name, None)
    if taken := next((name for name in (*specs, *fresh) if name in tensors or name in values), None):
        raise MismatchError(
            f"{rule} makes {full_name(*taken)}, which the checkpoint has already",
            remedy="drop or rename that one before",
        )
    tensors |= specs
    values |= fresh
    return step


def _families(tensors: Iterable[Name], values: Iterable[Name]) -> dict[_Family, dict[str, None]]:
    """Return the parameters that each family of names has."""
    names = [*tensors, *values]
    optimizers: dict[str, set[str]] = {}
    for item, fqn in names:
        if (options := _OPTIONS.fullmatch(fqn)) is not None:
            optimizers.setdefault(item, set()).add(options[1])
    found: dict[_Family, dict[str, None]] = {}
    for item, fqn in names:
        family, parameter = _parsed(item, fqn, optimizers.get(item, ()))
        found.setdefault(family, {})[parameter] = None
    return found


def _parsed(item: str, fqn: str, roots: Iterable[str]) -> tuple[_Family, str]:
    """Return the family of a name, and its parameter; `roots` are where the item has optimizers."""
    for root in roots:
        if fqn.startswith(f"{root}param_groups/"):
            return _Family(item, f"{root}param_groups/", ""), fqn.removeprefix(f"{root}param_groups/")
        state = _STATE.fullmatch(fqn.removeprefix(root)) if fqn.startswith(root) else None
        if state is not None:
            return _Family(item, f"{root}state/", state[2]), state[1]
    return _Family(item, "", ""), fqn


def _parameters(
    families: dict[_Family, dict[str, None]], tensors: dict[Name, TensorSpec]
) -> dict[str, Shape | None]:
    """Return all parameters and the shape of each: of what is as large as it, where only states are there."""
    shapes: dict[str, Shape | None] = {}
    for family, members in families.items():
        for parameter in members:
            spec = tensors.get(family.name(parameter))
            known = shapes.setdefault(parameter, None)
            if spec is not None and (known is None or len(known) < len(spec.shape)):
                shapes[parameter] = spec.shape
    return shapes


def _require_whole(rule: Rule, family: _Family, binding: Binding, members: Mapping[str, None]) -> None:
    for source in binding.sources:
        if source not in members:
            here = next(full_name(*family.name(one)) for one in binding.sources if one in members)
            raise MismatchError(
                f"{here} is to be joined with {full_name(*family.name(source))}, which the checkpoint does "
                f"not have, by {rule}"
            )


def _make(
    rule: Rule,
    binding: Binding,
    family: _Family,
    names: tuple[Name, ...],
    tensors: dict[Name, TensorSpec],
    step: _Step,
) -> dict[Name, TensorSpec]:
    """Add the tensors that a rule makes of some others, and return their specs."""
    if lost := next((name for name in names if name not in tensors), None):
        raise MismatchError(f"{full_name(*names[0])} is a tensor and {full_name(*lost)} a value")
    specs = [tensors[name] for name in names]
    if len({spec.dtype for spec in specs}) > 1:
        raise MismatchError(
            f"{', '.join(full_name(*name) for name in names)} are to become one tensor and are of the dtypes "
            f"{', '.join(spec.dtype for spec in specs)}"
        )
    shapes = tuple(spec.shape for spec in specs)
    if family.suffix and not any(shapes):
        scalar = Box((), ())
        pieces = tuple(Piece(number, scalar, scalar, ()) for number in range(len(names)))
        made = [Made((), pieces)] * len(binding.targets)
    else:
        made = rule.make(shapes, binding)
    new = {}
    for target, one in zip(binding.targets, made, strict=True):
        _claim(step.tensors, family.name(target), _SourcePart(one, names, shapes))
        new[family.name(target)] = TensorSpec(one.shape, specs[0].dtype)
    return new


def _take_over(
    binding: Binding, family: _Family, names: tuple[Name, ...], values: dict[Name, Any], step: _Step
) -> None:
    """Add the values that targets have of their sources, which must agree."""
    for name in names[1:]:
        if values[name] != values[names[0]]:
            raise MismatchError(
                f"{full_name(*names[0])} and {full_name(*name)} are to become one, and differ: "
                f"{values[names[0]]!r} and {values[name]!r}"
            )
    for target in binding.targets:
        _claim(step.values, family.name(target), names)


def _claim(known: dict[Name, Any], name: Name, what: Any) -> None:
    if name in known:
        raise MismatchError(f"a transform makes {full_name(*name)} of two different things")
    known[name] = what
