"""Does a load do what its caller expects?  Patterns and rules that match nothing, and loads of nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.loading.match import strict_patterns
from reknit.errors import MismatchError
from reknit.planner.gaps import SHOWN
from reknit.types.pattern_suggestions import suggest
from reknit.types.shard import full_name
from reknit.types.wanted import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.engine.loading.collect import Collected
    from reknit.engine.round_messages import LoadRequest
    from reknit.options import LoadOptions

MOST_LACKING = 1000
"""Limit of the names of missing tensors that a rank sends if it finds no tensor."""


def known_names(saved: Iterable[tuple[str, str]], collected: Collected) -> list[str]:
    """Return the names of the root's target and the `saved` ones, before and after transforms."""
    wanted, problems, transformed = collected.wanted, collected.problems, collected.transformed
    names = [fill.name for fill in collected.fills]
    names += [name for found in (problems.missing, problems.mismatched) for name, _ in found]
    entries = [*wanted.blobs, *wanted.own, *(note[:2] for note in wanted.notes), *saved]
    entries += [entry[:2] for entry in collected.checkpoint.manifest.unread]
    if transformed is not None:
        catalog = transformed.catalog
        for part in (catalog.tensors, catalog.blobs):
            entries += [(item, fqn) for item, members in part.items() for fqn in members]
    return list(dict.fromkeys([*names, *(full_name(*entry) for entry in entries)]))


def idle_patterns(
    requests: Sequence[LoadRequest],
    options: LoadOptions,
    lenient: Sequence[str],
    names: Callable[[], Sequence[str]],
    items: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Name the patterns of a load that match nothing; the exceptions in `strict` are apart from the others.

    With an exception that matches nothing a load is stricter than meant, which matters only where it does not
    fit.  A pattern of `only` has to match a name in the target of some rank.  Other
    patterns may also match a saved name (`names`), and a pattern of `strict` may match one of the `items` as
    a whole.
    """
    everywhere = [pattern for pattern in requests[0].idle if all(pattern in one.idle for one in requests)]
    if not everywhere:
        return [], []
    known = names()
    lines: list[str] = []
    spare: list[str] = []
    kinds = ("only", options.only), ("allow_shape_mismatch", options.allow_shape_mismatch)
    for kind, patterns in (*kinds, ("strict", strict_patterns(lenient))):
        for pattern in patterns:
            saved = kind != "only" and any(matches(name, [pattern]) for name in known)
            if pattern in everywhere and not saved and not (kind == "strict" and _of_item(pattern, items)):
                nor = "" if kind == "only" else ", nor in the checkpoint"
                near = f": {question}" if (question := suggest(pattern, known)) else ""
                (spare if kind == "strict" and pattern in lenient else lines).append(
                    f"{kind}: the pattern {pattern!r} matches nothing in the target of any rank{nor}{near}"
                )
    return lines, spare


def _of_item(pattern: str, items: Sequence[str]) -> bool:
    """Return whether a pattern matches an item as a whole, which may have no names."""
    return any(matches(f"{item}/", [pattern]) for item in items)


def require_rules(requests: Sequence[LoadRequest], collected: Collected) -> None:
    """Raise `MismatchError` for the first transform that matches nothing on any rank.

    Ranks may load different items, in which a rule may match nothing.
    """
    for number in requests[0].idle_rules:
        if all(number in request.idle_rules for request in requests):
            assert collected.transformed is not None
            raise collected.transformed.idle[number]


def require_some(
    requests: Sequence[LoadRequest],
    names: Callable[[], Sequence[str]],
    hint: Callable[[Sequence[str]], str | None],
    url: str,
    *,
    saved: bool,
) -> str | None:
    """Raise `MismatchError` for a load that wants tensors and restores none; return a warning, or None.

    A target without tensors may stay unchanged, which the warning says.  A target with tensors may restore
    only values if the checkpoint has no tensors (`saved` is False).
    """
    wanted = sum(request.num_tensors for request in requests)
    values = sum(request.num_values for request in requests)
    lacking = {name: why for request in requests for name, why in request.lacking}
    unfit = {name: why for request in requests for name, why in request.unfit}
    if any(request.num_filled for request in requests):
        return None
    if not wanted:
        return None if values or not lacking else f"nothing was restored: {next(iter(lacking))} is missing"
    if values and not saved:
        return None
    lines = [f"\n  {name}: {why}" for name, why in (*lacking.items(), *unfit.items())]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"\n  ... and {len(lines) - SHOWN} more"]
    known = dict.fromkeys(names())
    near = f"{first}: {suggest(first, known)}  " if known and (first := next(iter(lacking), "")) else ""
    raise MismatchError(
        "no tensor of the target would be restored, and that is an error of any load; nothing was changed:"
        + "".join(lines),
        path=url,
        remedy=hint(list(lacking)) or f"{near}`reknit show` lists the saved tensors and values",
    )
