"""The decisions of rank 0 in each round of a load, and its hints where names match nothing."""

from __future__ import annotations

import logging
import re
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct, structs

from reknit.engine import messages
from reknit.engine.loading.collect import unused_made_names
from reknit.engine.loading.contents import hand_out
from reknit.engine.loading.match import require_fit, strict_patterns, terms
from reknit.errors import CommError, MismatchError
from reknit.planner.columns import merged
from reknit.planner.tiling import SHOWN
from reknit.types.shard import full_name
from reknit.types.small import decoder, spelled
from reknit.types.wanted import matches, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

    from reknit.engine.loading.collect import Sought
    from reknit.engine.loading.contents import Handout, RootMetadata
    from reknit.engine.loading.task import LoadTask
    from reknit.engine.messages import LoadRequest
    from reknit.engine.saving.packing import Sections
    from reknit.options import LoadOptions


MOST_LACKING = 1000
"""Limit of the names of missing tensors that a rank sends if it finds no tensor."""


def known_names(saved: Iterable[tuple[str, str]], sought: Sought) -> list[str]:
    """Return the names of the root's target and the `saved` ones, before and after transforms."""
    wanted, problems, transformed = sought.wanted, sought.problems, sought.transformed
    names = [fill.name for fill in sought.fills]
    names += [name for found in (problems.missing, problems.mismatched) for name, _ in found]
    entries = [*wanted.blobs, *wanted.own, *(note[:2] for note in wanted.notes), *saved]
    entries += [entry[:2] for entry in sought.checkpoint.manifest.unread]
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


def require_rules(requests: Sequence[LoadRequest], sought: Sought) -> None:
    """Raise `MismatchError` for the first transform that matches nothing on any rank.

    Ranks may load different items, in which a rule may match nothing.
    """
    for number in requests[0].idle_rules:
        if all(number in request.idle_rules for request in requests):
            assert sought.transformed is not None
            raise sought.transformed.idle[number]


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


_NAME = r"((?:[^/]+/)(?:(?:.*/)?(?:state|param_groups)/|(?:.*/)?))([^/].*)"
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
_SAMPLE = 8
_MOST_TRIED = 4
_MOST_ROOTS = 6
_MOST_LEFT = 3
"""Names without a place in the target that a hint leaves out, such as the count of averaged models."""


class _NameSplit(NamedTuple):
    """The prefix of a name before that of a parameter, and the rest, which begins with the parameter."""

    root: str
    rest: str


class _Guess(Struct, frozen=True):
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
    if best.found == len(missing) and 0 < len(left) <= _MOST_LEFT and set("*?[]").isdisjoint("".join(left)):
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
    found = map(re.compile(_NAME).fullmatch, names)
    return [_NameSplit(one[1], one[2]) for one in found if one is not None]


logger = logging.getLogger("reknit")


class RowAnswers(Struct, frozen=True):
    """On rank 0: the whole metadata, the entries that rank 0 itself takes, and all answers."""

    whole: RootMetadata
    sought: Sought
    handout: Handout


def rows_for(whole: RootMetadata, sought: Sought, asked: Sequence[messages.Asked]) -> RowAnswers:
    """Answer each rank with the index rows of its tensors."""
    handout = hand_out(whole.checkpoint, asked)
    left = handout.left + unused_made_names(sought, asked, handout.left)
    return RowAnswers(whole, sought, structs.replace(handout, left=left))


class LoadRequests(Struct, frozen=True):
    """The requests of some ranks; `offers` are the ranges that they would read: for tensors, for objects."""

    requests: list[messages.LoadRequest]
    offers: Sections | None

    def pack(self) -> bytes:
        """Return them as one message."""
        return messages.encode((self.requests, b"" if self.offers is None else self.offers.pack()))

    @classmethod
    def unpack(cls, parts: Sequence[bytes]) -> list[LoadRequests]:
        """Return the content of each of several messages."""
        from reknit.engine.saving.packing import Sections  # a rank alone packs nothing

        both = [_decode(part) for part in parts]
        offers = iter(Sections.unpack([offered for _, offered in both if offered]))
        return [cls(requests, next(offers) if offered else None) for requests, offered in both]


_decode = decoder(tuple[list[messages.LoadRequest], bytes])


def merge_requests(parts: Sequence[LoadRequests]) -> LoadRequests:
    """Return the requests of several ranks, or of several parts of the tree, as one."""

    given = [part.offers for part in parts if part.offers is not None]
    requests = [request for part in parts for request in part.requests]
    return LoadRequests(requests, type(given[0])(*map(merged, zip(*given, strict=True))) if given else None)


def judge(task: LoadTask, located: RowAnswers, requests: LoadRequests) -> list[messages.LoadDecision]:
    """Raise one error that lists the unfit names of all ranks; without any, divide the reads."""
    loads = sorted(requests.requests, key=lambda load: load.rank)
    options, handout = task.options, located.handout
    taken = terms(options).takes
    unexpected = [name for key in handout.left if taken(name := full_name(*key))]
    _require_use(task, located, loads, unexpected)
    early = any(load.early for load in loads)
    decision = partial(messages.LoadDecision, unexpected, handout.items, early)
    if requests.offers is None:
        return [decision()] * len(loads)
    from reknit.engine.sharing.shared_read import share_out  # a rank alone shares nothing

    plans = (share_out(offers, len(loads), options) for offers in requests.offers)
    # Ranks with the same plans have one object, which is encoded once.
    return list(map(cache(decision), *plans))


def _require_use(
    task: LoadTask, located: RowAnswers, loads: Sequence[messages.LoadRequest], unexpected: Sequence[str]
) -> None:
    """Raise an error for names that do not fit, patterns that match nothing, and a load of nothing."""
    options, url, handout = task.options, task.storage.url, located.handout
    whole, checkpoint = located.whole.tensors, located.whole.checkpoint
    saved = [*checkpoint.index.ids, *checkpoint.blob_names()]

    def hint(missing: Sequence[str]) -> str | None:
        left = set(unexpected)
        settled = [name for key in saved if (name := full_name(*key)) not in left]
        return prefix_hint(missing, left, settled, free=not options.transforms)

    require_rules(loads, located.sought)
    items = [*checkpoint.items, *handout.items]

    def known() -> list[str]:
        every = [*saved, *handout.left, *(each[:2] for each in whole)]
        return known_names(every, located.sought)

    idle, spare = idle_patterns(loads, options, task.lenient, known, items)
    damaged = handout.damaged
    require_fit(loads, unexpected, idle, task.lenient, url, spare=spare, damaged=damaged, hint=hint)
    odd = require_some(loads, lambda: [full_name(*each[:2]) for each in whole], hint, url, saved=bool(whole))
    if odd is not None:
        logger.warning("the load of %s is done, but %s", url, odd)


def require_cause(ends: Sequence[messages.Stopped]) -> None:
    """Raise an error when ranks stopped because of others and no rank has reported a cause."""
    stopped = [end for end in ends if end.why is not None]
    if stopped:
        ranks = spelled(one.rank for one in stopped)
        raise CommError(f"{ranks} could not go on: {stopped[0].why}", rank=stopped[0].rank, phase="load")
