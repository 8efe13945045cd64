"""The ratios that the measured loads should have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.reports import ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.reports import Row

EACH = "*"


class Aim(NamedTuple):
    """A ratio of two measured values, each named by its path in the results, such as ``single > cold > s``.

    `EACH` in a path stands for all names, the same in both paths, and {} in `what` for these names.
    A ratio without an `aim` is for information.
    """

    what: str
    over: str
    under: str
    sign: str
    aim: float | None = None


def _rival(case: str) -> Aim:
    """Return the aim of a case for which DCP reads more than it needs."""
    here = f"reshard > cases > {case}"
    return Aim(f"{case}: DCP / reknit", f"{here} > dcp > s", f"{here} > verified > s", ">=", 3.0)


def _same_layout(kind: str, limit: str, most: float, least: float) -> tuple[Aim, ...]:
    here = f"sharded > {kind}"
    ours, own = f"{here} > reknit > s", f"{here} > dcp > DCP, its own format > s"
    name = f"same layout, {kind}"
    return (
        Aim(f"{name}: reknit / {limit.replace('_', ' ')}", ours, f"{here} > {limit}_s", "<=", most),
        Aim(f"{name}: DCP's best / reknit", f"{here} > dcp_best_s", ours, ">=", least),
        Aim(f"{name}: DCP's own format / reknit", own, ours, ">="),
    )


def _one_process(kind: str, least: float) -> tuple[Aim, ...]:
    here, name = f"single > {kind}", f"one process, {kind}"
    ours = f"{here} > reknit > s"
    return (
        Aim(f"{name}: safetensors' best / reknit", f"{here} > safetensors_best_s", ours, ">=", 1.0),
        Aim(f"{name}: DCP's best / reknit", f"{here} > dcp_best_s", ours, ">=", least),
    )


def _sharing(storage: str) -> tuple[Aim, ...]:
    model = f"replicated > {EACH}"
    here, name = f"{model} > storages > {storage}", f"{{}} on 4 ranks, {storage}"
    read, seconds = f"{here} > always > read_nbytes", f"{here} > always > s"
    gain = None if storage == "disk" else 3.5
    return (
        Aim(f"{name}: bytes read / unique bytes, shared", read, f"{model} > unique_nbytes", "<=", 1.0),
        Aim(f"{name}: not shared / shared", f"{here} > never > s", seconds, ">=", gain),
        Aim(f"{name}: auto / the quicker", f"{here} > auto > s", f"{here} > quicker_s", "<=", 1.1),
    )


def _bytes(what: str, over: str, under: str, aim: float | None = None) -> Aim:
    case = f"reshard > cases > {EACH}"
    return Aim(f"{{}}: bytes read {what}", f"{case} > {over}", f"{case} > {under}", "<=", aim)


_CASE = f"reshard > cases > {EACH}"
_SECONDS = f"{_CASE} > verified > s"
_READ, _NEEDED = "verified > read_nbytes", "needed_nbytes"
_EXTRA = f"memory > loads > {EACH} > extra_nbytes"

AIMS = (
    *_same_layout("cold", "raw_read", 1.25, 1.5),
    *_same_layout("warm", "memcpy", 2.5, 3.0),
    *_one_process("cold", 1.5),
    *_one_process("warm", 3.0),
    _bytes("/ needed, unverified", "unverified > read_nbytes", _NEEDED, 1.05),
    _bytes("by system calls / needed, unverified", "unverified > read_by_calls_nbytes", _NEEDED),
    _bytes("/ (needed + 5 % + two blocks per run)", _READ, "verified_bound_nbytes", 1.0),
    _bytes("/ digest blocks that hold a byte needed", _READ, "in_blocks_nbytes"),
    _rival("FSDP 4 to TP 2"),
    *(
        _rival(f"{source}, {part}")
        for source in ("FSDP 4", "DDP 4")
        for part in ("1/8 of the rows", "1/8 of the columns", "one row")
    ),
    Aim("{}: DCP / reknit", f"{_CASE} > dcp > s", _SECONDS, ">="),
    Aim("{}: DCP from mapped safetensors / reknit", f"{_CASE} > dcp_safetensors > s", _SECONDS, ">="),
    *_sharing("disk"),
    *_sharing("200 MB/s per rank"),
    *_sharing("200 MB/s per host"),
    Aim("{}: extra memory of a rank / its budget", _EXTRA, "memory > budget_nbytes", "<=", 1.0),
)


def rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every aim of the parts that were measured, once per name that `EACH` stands for."""
    given: set[str] = set()
    for aim in AIMS:
        path = aim.over.split(" > ")
        if path[0] not in result:
            continue
        at = path.index(EACH) if EACH in path else None
        below = {} if at is None else _value(result, path[:at])
        names = [""] if at is None else [n for n, of in (below or {}).items() if isinstance(of, dict)]
        for name in names:
            what = aim.what.format(name)
            if what in given:  # an aim for one name comes before the information about all
                continue
            given.add(what)
            over, under = (
                _value(result, path.replace(EACH, name).split(" > ")) for path in (aim.over, aim.under)
            )
            yield what, ratio(over, under), aim.sign, aim.aim


def _value(found: Any, path: list[str]) -> Any:
    """Return the value at a path, None without one."""
    for step in path:
        found = found.get(step) if isinstance(found, dict) else None
    return found
