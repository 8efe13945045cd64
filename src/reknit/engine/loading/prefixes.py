"""Do the names of a target and of a checkpoint differ by a prefix?  Which transform makes them equal?"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

_NAME = re.compile(r"((?:[^/]+/)(?:(?:.*/)?(?:state|param_groups)/|(?:.*/)?))([^/].*)")
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
_SAMPLE = 8
_MOST_TRIED = 4
_MOST_ROOTS = 6
_MOST_LEFT = 3
"""Names without a place in the target that a hint leaves out, such as the count of averaged models."""
_SPECIAL = re.compile(r"[*?\[\]]")


class _NameSplit(NamedTuple):
    """The prefix of a name before that of a parameter, and the rest, which begins with the parameter."""

    root: str
    rest: str


class _Guess(NamedTuple):
    """A way from names of the checkpoint to names of the target: their number, a hint, and the rule."""

    found: int
    said: str
    rule: str | None
    apply: Callable[[str], str]


def prefix_hint(
    missing: Collection[str], unexpected: Collection[str], settled: Collection[str], *, free: bool = True
) -> str | None:
    """Return the remedy for names that differ by a prefix, or by the prefix of a wrapper, or None.

    `missing` are names that only the target has, `unexpected` names that only the checkpoint has, and
    `settled` names of the checkpoint that fit.  A transform is suggested if it changes no settled name, and
    the load is `free` of other transforms.
    """
    guesses = [*_prefixes(missing, unexpected), *_wrappers(missing, unexpected)]
    best = max(guesses, key=lambda guess: guess.found, default=None)
    if best is None or not best.found or 2 * best.found < len(missing):
        return None
    said = f"{'all' if best.found == len(missing) else 'most'} {best.said}"
    if best.rule is None or not free or any(best.apply(name) != name for name in settled):
        return (
            f"{said}: give both the same names, or pass the module itself, which has names without wrappers"
        )
    call = f"options=reknit.LoadOptions(transforms=[{best.rule}])"
    left = [name for name in map(best.apply, unexpected) if name not in missing]
    if best.found == len(missing) and 0 < len(left) <= _MOST_LEFT and not any(map(_SPECIAL.search, left)):
        call += f", strict={[f'!{name}' for name in sorted(left)]}"
    return f"{said}: pass {call}"


def _prefixes(missing: Collection[str], unexpected: Collection[str]) -> Iterator[_Guess]:
    """Yield guesses of a prefix that all names of the checkpoint have, or all names of the target."""
    wanted, saved = _parted(missing), _parted(unexpected)
    there = set(saved)
    more: Counter[str] = Counter()
    fewer: Counter[str] = Counter()
    for root, rest in wanted[:: max(len(wanted) // _SAMPLE, 1)]:
        for other in saved:
            if other.root == root and other.rest.endswith(f".{rest}"):
                more[other.rest.removesuffix(rest)] += 1
        for dot in re.finditer(r"\.", rest):
            if (root, rest[dot.end() :]) in there:
                fewer[rest[: dot.end()]] += 1
    for prefix, _ in more.most_common(_MOST_TRIED):
        roots = [root for root, rest in wanted if (root, prefix + rest) in there]
        others = {root for root, rest in saved if rest.startswith(prefix)}
        rename = {f"{root}{prefix}": root for root in _with_states(roots, others)}
        yield _guess(len(roots), f"names differ by the prefix {prefix!r} in the checkpoint", rename)
    for prefix, _ in fewer.most_common(_MOST_TRIED):
        roots = [
            root for root, rest in wanted if rest.startswith(prefix) and (root, rest[len(prefix) :]) in there
        ]
        rename = {root: f"{root}{prefix}" for root in _with_states(roots, {root for root, _ in saved})}
        yield _guess(len(roots), f"names differ by the prefix {prefix!r} in the target", rename)


def _with_states(roots: Iterable[str], saved: Container[str]) -> list[str]:
    """Return roots, with the roots of the optimizer states that the target may not have yet."""
    both = (root for one in roots for root in (one, one.replace("param_groups/", "state/")))
    return [root for root in dict.fromkeys(both) if root in saved]


def _guess(found: int, said: str, rename: dict[str, str]) -> _Guess:
    def apply(name: str) -> str:
        old = max((old for old in rename if name.startswith(old)), key=len, default="")
        return rename[old] + name.removeprefix(old) if old else name

    rule = f"reknit.transforms.names({rename!r})" if len(rename) <= _MOST_ROOTS else None
    return _Guess(found, said, rule, apply)


def _wrappers(missing: Collection[str], unexpected: Collection[str]) -> Iterator[_Guess]:
    """Yield guesses of wrappers anywhere in the names, of the checkpoint or of the target."""
    for wrapper in _WRAPPED:
        expression = rf"\b{wrapper}\."
        inner = re.compile(expression)

        def apply(name: str, inner: re.Pattern[str] = inner) -> str:
            return inner.sub("", name)

        said = f"names differ by the wrapper {wrapper!r}"
        stripped = {apply(name) for name in unexpected if inner.search(name)}
        rule = f'reknit.transforms.names(rewrite=[(r"{expression}", "")])'
        yield _Guess(len(stripped.intersection(missing)), f"{said} in the checkpoint", rule, apply)
        plain = [name for name in missing if inner.search(name) and apply(name) in unexpected]
        yield _Guess(len(plain), f"{said} in the target", None, apply)


def _parted(names: Collection[str]) -> Sequence[_NameSplit]:
    """Return names split into their parts, without items that are themselves a tensor or value."""
    return [_NameSplit(found[1], found[2]) for name in names if (found := _NAME.fullmatch(name)) is not None]
