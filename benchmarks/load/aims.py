"""What the measured ratios should be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.aims import ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.aims import Row

EACH = "*"


class Aim(NamedTuple):
    """A ratio of two measured values, each named by its path in the results.

    `EACH` in a path stands for all names there are, the same in both paths; {} in `what` for these names.
    Without an `aim` the ratio is told for information.
    """

    what: str
    over: tuple[str, ...]
    under: tuple[str, ...]
    sign: str
    aim: float | None


_CASE = ("reshard", "cases", EACH)
_COPIES = ("replicated", EACH, "storages")


def _rival(case: str) -> Aim:
    """Return the aim of a case for which DCP reads more than it needs."""
    here = ("reshard", "cases", case)
    return Aim(f"{case}: DCP / reknit", (*here, "dcp", "s"), (*here, "verified", "s"), ">=", 3.0)


def _same_layout(kind: str, aim: float) -> tuple[Aim, ...]:
    here = ("sharded", kind)
    ours = (*here, "reknit", "s")
    own = (*here, "dcp", "DCP, its own format", "s")
    return (
        Aim(f"same layout, {kind}: DCP's best / reknit", (*here, "dcp_best_s"), ours, ">=", aim),
        Aim(f"same layout, {kind}: DCP's own format / reknit", own, ours, ">=", None),
    )


def _one_process(kind: str) -> tuple[Aim, ...]:
    here = ("single", kind)
    ours = (*here, "reknit", "s")
    return (
        Aim(
            f"one process, {kind}: safetensors' best / reknit", (*here, "safetensors_best_s"), ours, ">=", 1.0
        ),
        Aim(
            f"one process, {kind}: DCP's best / reknit",
            (*here, "dcp_best_s"),
            ours,
            ">=",
            1.5 if kind == "cold" else 3.0,
        ),
    )


def _sharing(storage: str) -> tuple[Aim, ...]:
    here = (*_COPIES, storage)
    size = "{} on 4 ranks"
    return (
        Aim(
            f"{size}, {storage}: bytes read / unique bytes, shared",
            (*here, "always", "read_nbytes"),
            ("replicated", EACH, "unique_nbytes"),
            "<=",
            1.0,
        ),
        Aim(
            f"{size}, {storage}: not shared / shared",
            (*here, "never", "s"),
            (*here, "always", "s"),
            ">=",
            None if storage == "disk" else 3.5,
        ),
        Aim(
            f"{size}, {storage}: auto / the quicker",
            (*here, "auto", "s"),
            (*here, "quicker_s"),
            "<=",
            1.1,
        ),
    )


AIMS = (
    Aim(
        "same layout, cold: reknit / raw read",
        ("sharded", "cold", "reknit", "s"),
        ("sharded", "cold", "raw_read_s"),
        "<=",
        1.25,
    ),
    *_same_layout("cold", 1.5),
    Aim(
        "same layout, warm: reknit / memcpy",
        ("sharded", "warm", "reknit", "s"),
        ("sharded", "warm", "memcpy_s"),
        "<=",
        2.5,
    ),
    *_same_layout("warm", 3.0),
    *_one_process("cold"),
    *_one_process("warm"),
    Aim(
        "{}: bytes read / needed, unverified",
        (*_CASE, "unverified", "read_nbytes"),
        (*_CASE, "needed_nbytes"),
        "<=",
        1.05,
    ),
    Aim(
        "{}: bytes read by system calls / needed, unverified",
        (*_CASE, "unverified", "read_by_calls_nbytes"),
        (*_CASE, "needed_nbytes"),
        "<=",
        None,
    ),
    Aim(
        "{}: bytes read / (needed + 5 % + two blocks per run)",
        (*_CASE, "verified", "read_nbytes"),
        (*_CASE, "verified_bound_nbytes"),
        "<=",
        1.0,
    ),
    Aim(
        "{}: bytes read / digest blocks that hold a byte needed",
        (*_CASE, "verified", "read_nbytes"),
        (*_CASE, "in_blocks_nbytes"),
        "<=",
        None,
    ),
    _rival("FSDP 4 to TP 2"),
    *(
        _rival(f"{source}, {part}")
        for source in ("FSDP 4", "DDP 4")
        for part in ("1/8 of the rows", "1/8 of the columns", "one row")
    ),
    Aim("{}: DCP / reknit", (*_CASE, "dcp", "s"), (*_CASE, "verified", "s"), ">=", None),
    Aim(
        "{}: DCP from mapped safetensors / reknit",
        (*_CASE, "dcp_safetensors", "s"),
        (*_CASE, "verified", "s"),
        ">=",
        None,
    ),
    *_sharing("disk"),
    *_sharing("200 MB/s per rank"),
    *_sharing("200 MB/s per host"),
    Aim(
        "{}: extra memory of a rank / its budget",
        ("memory", "loads", EACH, "extra_nbytes"),
        ("memory", "budget_nbytes"),
        "<=",
        1.0,
    ),
    Aim(
        "onto a GPU, {}: load / the slower of reading and copying",
        ("gpu", EACH, "to_device_s"),
        ("gpu", EACH, "slower_half_s"),
        "<=",
        1.25,
    ),
    Aim(
        "onto a GPU, {}: load / reading, then copying",
        ("gpu", EACH, "to_device_s"),
        ("gpu", EACH, "one_after_another_s"),
        "<=",
        1.0,
    ),
)


def rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every aim of the parts that were measured, once per name that `EACH` stands for."""
    reported: set[str] = set()
    for aim in AIMS:
        if aim.over[0] not in result:
            continue
        for names in _names(result, aim.over):
            what = aim.what.format(*names)
            if what in reported:  # an aim for one name comes before the information about all
                continue
            reported.add(what)
            over, under = (_value(result, path, names) for path in (aim.over, aim.under))
            yield what, ratio(over, under), aim.sign, aim.aim


def _names(found: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield what `EACH` stands for in a path: the names of everything that has parts."""
    if EACH not in path:
        yield ()
        return
    at = path.index(EACH)
    for step in path[:at]:
        found = found.get(step) if isinstance(found, dict) else None
    for name, below in found.items() if isinstance(found, dict) else ():
        if isinstance(below, dict):
            for rest in _names(below, path[at + 1 :]):
                yield (name, *rest)


def _value(found: Any, path: tuple[str, ...], names: tuple[str, ...]) -> float | None:
    """Return the value at a path, None where there is none."""
    given = iter(names)
    for step in path:
        if not isinstance(found, dict):
            return None
        found = found.get(next(given) if step == EACH else step)
    return found if isinstance(found, int | float) else None
