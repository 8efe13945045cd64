"""One rule applied to all names of a checkpoint: its targets, and their sources."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import MismatchError
from reknit.transforms.base import Binding, Made, Pattern, Piece
from reknit.types.box import Box
from reknit.types.shard import TensorSpec, full_name
from reknit.types.wanted import some_of, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reknit.transforms.base import Rule, Shape

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


class SourcePart(NamedTuple):
    """The sources of a tensor: the names and shapes of other tensors, and the place of each box of them."""

    made: Made
    names: tuple[Name, ...]
    shapes: tuple[Shape, ...]


class Step(NamedTuple):
    """The results of one rule: tensors and values by their new names, of others by the names before.

    `idle` is the error of a rule that matches nothing, and has to.
    """

    tensors: dict[Name, SourcePart]
    values: dict[Name, tuple[Name, ...]]
    dropped: set[Name]
    idle: MismatchError | None = None

    def sources(self, name: Name, *, tensors: bool) -> tuple[Name, ...]:
        """Return the names before of the sources of a tensor or a value."""
        if not tensors:
            return self.values.get(name, (name,))
        return self.tensors[name].names if name in self.tensors else (name,)


def apply_rule(rule: Rule, tensors: dict[Name, TensorSpec], values: dict[Name, Any]) -> Step:
    """Apply a rule to all names, in place.

    Raises `MismatchError` for a rule that matches unfit tensors or values, or that gives two of them one
    name.
    """
    families = _families(tensors, values)
    parameters = _parameters(families, tensors)
    bindings = rule.bind(parameters)
    step = Step({}, {}, set(), None if bindings or rule.optional else _idle(rule, parameters))
    specs: dict[Name, TensorSpec] = {}
    gone: set[Name] = set()
    for binding in bindings:
        for family, members in families.items():
            if any(source in members for source in binding.sources):
                names = tuple(family.name(source) for source in binding.sources)
                _require_whole(rule, family, binding, members)
                if names[0] in tensors:
                    specs |= _make(rule, binding, family, names, tensors=tensors, step=step)
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
            remedy="drop or rename that one first",
        )
    tensors |= specs
    values |= fresh
    return step


def _idle(rule: Rule, names: Iterable[str]) -> MismatchError:
    """Return the error of a rule that matches none of the names."""
    known = list(names)
    source = getattr(rule, "source", None) or next(iter(getattr(rule, "sources", ())), None)
    near = some_of(known) if source is None else suggest(str(source), known, _matcher)
    remedy = "templates match names as in `reknit show`, without the item"
    return MismatchError(
        f"the transform {rule} matches no name in the checkpoint",
        remedy=f"{near}  {remedy}" if near.endswith("?") else "; ".join(filter(None, (remedy, near))),
    )


def _matcher(template: str) -> Callable[[str], object]:
    """Return the function that returns whether a template matches a name."""
    return Pattern(template).match


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
    """Return all parameters and the shape of each: of a state as large as it, where only states are there."""
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
                f"{here} should be joined with {full_name(*family.name(source))}, which the checkpoint does "
                f"not have, by {rule}"
            )


def _make(
    rule: Rule,
    binding: Binding,
    family: _Family,
    names: tuple[Name, ...],
    *,
    tensors: dict[Name, TensorSpec],
    step: Step,
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
        _claim(step.tensors, family.name(target), SourcePart(one, names, shapes))
        new[family.name(target)] = TensorSpec(one.shape, specs[0].dtype)
    return new


def _take_over(
    binding: Binding, family: _Family, names: tuple[Name, ...], values: dict[Name, Any], step: Step
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
