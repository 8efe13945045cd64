"""The ratios of the measured loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.reports import ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.reports import Row

EACH = "*"


class Ratio(NamedTuple):
    """A ratio of two measured values, each named by its path in the results, such as ``single > cold > s``.

    `EACH` in a path stands for all names, the same in both paths, and {} in `what` for these names.
    """

    what: str
    over: str
    under: str


def _same_layout(kind: str, limit: str) -> tuple[Ratio, ...]:
    here = f"sharded > {kind}"
    ours, own = f"{here} > reknit > s", f"{here} > dcp > DCP, its own format > s"
    name = f"same layout, {kind}"
    return (
        Ratio(f"{name}: reknit / {limit.replace('_', ' ')}", ours, f"{here} > {limit}_s"),
        Ratio(f"{name}: DCP's best / reknit", f"{here} > dcp_best_s", ours),
        Ratio(f"{name}: DCP's own format / reknit", own, ours),
    )


def _one_process(kind: str) -> tuple[Ratio, ...]:
    here, name = f"single > {kind}", f"one process, {kind}"
    ours = f"{here} > reknit > s"
    return (
        Ratio(f"{name}: safetensors' best / reknit", f"{here} > safetensors_best_s", ours),
        Ratio(f"{name}: DCP's best / reknit", f"{here} > dcp_best_s", ours),
    )


def _sharing(storage: str) -> tuple[Ratio, ...]:
    model = f"replicated > {EACH}"
    here, name = f"{model} > storages > {storage}", f"{{}} on 4 ranks, {storage}"
    read, seconds = f"{here} > always > read_nbytes", f"{here} > always > s"
    return (
        Ratio(f"{name}: bytes read / unique bytes, shared", read, f"{model} > unique_nbytes"),
        Ratio(f"{name}: not shared / shared", f"{here} > never > s", seconds),
        Ratio(f"{name}: auto / the quicker", f"{here} > auto > s", f"{here} > quicker_s"),
    )


def _bytes(what: str, over: str, under: str) -> Ratio:
    return Ratio(f"{{}}: bytes read {what}", f"{_CASE} > {over}", f"{_CASE} > {under}")


_CASE = f"reshard > cases > {EACH}"
_SECONDS = f"{_CASE} > verified > s"
_READ, _NEEDED = "verified > read_nbytes", "needed_nbytes"
_EXTRA = f"memory > loads > {EACH} > extra_nbytes"

RATIOS = (
    *_same_layout("cold", "raw_read"),
    *_same_layout("warm", "memcpy"),
    *_one_process("cold"),
    *_one_process("warm"),
    _bytes("/ needed, unverified", "unverified > read_nbytes", _NEEDED),
    _bytes("by system calls / needed, unverified", "unverified > read_by_calls_nbytes", _NEEDED),
    _bytes("/ (needed + 5 % + two blocks per run)", _READ, "verified_bound_nbytes"),
    _bytes("/ digest blocks that hold a byte needed", _READ, "in_blocks_nbytes"),
    Ratio("{}: DCP / reknit", f"{_CASE} > dcp > s", _SECONDS),
    Ratio("{}: DCP from mapped safetensors / reknit", f"{_CASE} > dcp_safetensors > s", _SECONDS),
    *_sharing("disk"),
    *_sharing("200 MB/s per rank"),
    *_sharing("200 MB/s per host"),
    Ratio("{}: extra memory of a rank / its budget", _EXTRA, "memory > budget_nbytes"),
)


def rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every ratio of the parts that were measured, once per name that `EACH` stands for."""
    for each in RATIOS:
        path = each.over.split(" > ")
        if path[0] not in result:
            continue
        at = path.index(EACH) if EACH in path else None
        below = {} if at is None else _value(result, path[:at])
        names = [""] if at is None else [n for n, of in (below or {}).items() if isinstance(of, dict)]
        for name in names:
            over, under = (
                _value(result, path.replace(EACH, name).split(" > ")) for path in (each.over, each.under)
            )
            yield each.what.format(name), ratio(over, under)


def _value(found: Any, path: list[str]) -> Any:
    """Return the value at a path, None without one."""
    for step in path:
        found = found.get(step) if isinstance(found, dict) else None
    return found
