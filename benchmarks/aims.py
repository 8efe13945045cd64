"""The aims of all benchmarks: each has one place here, with the reason that a run prints if it is missed."""

from __future__ import annotations

import statistics
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Figures = Mapping[str, Sequence[float]]
    """The figures of each contestant, one for each round."""


class Aim(NamedTuple):
    """The most that a figure of a benchmark's row should be, or with `least` the least.

    `bench` has the arguments of ``scripts/bench`` that measure it.  `row` is the name of the row, in which
    ``*`` stands for sizes.  The figure of reknit is divided by that of
    the best contestant whose name is like `over`; without `over` it counts alone.
    """

    bench: str
    row: str
    limit: float
    over: str = ""
    why: str = ""
    least: bool = False

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.least else '<='} {self.limit:g}"


class Judged(NamedTuple):
    """An aim and the value that was measured for it, None if it was not."""

    aim: Aim
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.aim.limit if self.aim.least else self.value <= self.aim.limit

    @property
    def short(self) -> str:
        """Return the value with its aim, and how far it is away."""
        if self.value is None:
            return f"aim {self.aim.wanted}: not measured"
        over = f" of {self.aim.over.strip('*')}" if self.aim.over else ""
        far = "met" if self.met else f"NOT met, {self.value / self.aim.limit:.3g} of the aim"
        return f"{self.value:.3g}{over}, aim {self.aim.wanted}: {far}"

    @property
    def text(self) -> str:
        """Return the same, with the reason if it is missed."""
        return f"{self.short}; {self.aim.why or 'no reason found'}" if self.met is False else self.short


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median ratio of rounds side by side, or without as many rounds the ratio of the medians."""
    if len(ours) == len(theirs):
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


def best(figures: Figures, names: Collection[str]) -> str | None:
    """Return the contestant with the least median."""
    medians = {name: statistics.median(figures[name]) for name in names if figures.get(name)}
    return min(medians, key=medians.__getitem__, default=None)


def judged(bench: str, row: str, figures: Figures, ours: Collection[str]) -> Iterator[Judged]:
    """Yield the aims of a row with their values."""
    mine = best(figures, ours)
    for aim in AIMS:
        if aim.bench != bench or not fnmatchcase(row, aim.row):
            continue
        others = [name for name in figures if name not in ours and fnmatchcase(name, aim.over)]
        theirs = best(figures, others)
        if mine is None or (aim.over and theirs is None):
            yield Judged(aim, None)
        else:
            value = ratio(figures[mine], figures[theirs]) if theirs else statistics.median(figures[mine])
            yield Judged(aim, value)


_MODULES = (
    "half of the time imports modules, and the rest connects the ranks; torch has DCP's modules already. "
    "Fewer modules, and a first round by the process group that exists, would close it."
)
_AGENT = (
    "two thirds of the time import modules, and two rounds follow; agents start beside it. A process with "
    "its imports done, started by `import` or `Checkpointer`, would close it."
)
_DISK = "one disk limits all, and each byte is checked. Fewer imports before the first read would close it."
_TENSORS = (
    "the rest is the cost for each tensor: its match, its view and its row of the index. Columns in "
    "the place of objects would close it."
)
_READ = (
    "a read with its digest takes 1.45 of the CPU of a read alone, and both cores read; the rest is the cost "
    "for each tensor. Digests by hardware would close it."
)
_SMALL = (
    "2.5 ms pass before the first write, and 2.5 ms in the commit of index and manifest, with eight syncs in "
    "all. A commit of one file needs two."
)
_ROOT = "it reads a message of each rank with all boxes. Ranks that send differences alone would close it."
_CHANGED = (
    "a file of 64 MiB is the least that is taken over. With 16 MiB, 2 % is written, but loads from the page "
    "cache take 1.5 of the time (decision 0033)."
)
_JAX = (
    "two threads copy the bytes, since memory of NumPy behind an array may change, and JAX does not show "
    "which arrays have such memory. Orbax copies nothing on a CPU."
)
_LAZY = (
    "the walk takes 4 of 10 ms of CPU, and a sample of all bytes, which shows changes behind an array, 2. "
    "A walk that is kept would close it."
)
_RESHARD = (
    "two threads copy rows of 512 bytes, and fresh memory is mapped; 15 ms are Python. Of Orbax's CPU a "
    "load takes 0.35, and one into another layout 0.53."
)
_STORE = (
    "on two cores the digests, the server and the client share the time. Fewer copies between the client and "
    "the tensors would close it."
)
_WALK = (
    "looking at the tensors takes half of the CPU, since each pass misses the cache of the processor, and "
    "copies of 4 KiB a third; agents share the cores. An agent that writes later would close it."
)
_STALL = "without a GPU there is no copy from a device, and both copy the same bytes"

_WAITS, _WARM = "* MB, 1 rank: save that waits", "1 rank: warm load"
_ORBAX, _STALLS = "JAX, * MB over 8 devices: ", "FSDP2 on disk: "


def _single() -> Iterator[Aim]:
    yield Aim("table single", _WAITS, 1.0, "torch.save + fsync", _SMALL)
    yield Aim("table single", "* tensors: CPU of a load", 1.5, "safetensors*", _TENSORS)
    for size, most in (("MB", 0.8), ("GiB", 0.7)):
        yield Aim("table single", f"* {size}, {_WARM}", most, "DCP*", _READ)
        yield Aim("table single", f"* {size}, {_WARM}", 1.15, "raw read", _READ)
    yield Aim(
        "table single", "* GiB, 1 rank: peak memory of a load / bytes owned", 1.02, why="the pieces in flight"
    )


def _many_tensors() -> Iterator[Aim]:
    name = "FSDP2, 2 ranks x * small tensors, a load"
    yield Aim("table small", f"{name}: calls / tensors", 60, why=_TENSORS)
    yield Aim("table small", f"{name}: CPU", 0.025, why=_TENSORS)
    yield Aim(
        "table dtensors", "* ranks x * DTensors, state safe after, the same again", 2.0, "memcpy", _WALK
    )


def _jax() -> Iterator[Aim]:
    yield Aim("table jax", f"{_ORBAX}save that waits", 0.2, "Orbax", "one disk and the digests limit it")
    for stage, why in (("", _JAX), (', stage="lazy"', _LAZY)):
        yield Aim("table jax", f"{_ORBAX}blocked{stage}", 0.3, "Orbax", why)
    yield Aim("table jax", f"{_ORBAX}load", 0.4, "Orbax", _RESHARD)
    yield Aim("table jax", f"{_ORBAX}load into another layout", 0.5, "Orbax", _RESHARD)
    yield Aim("table jax", f"{_ORBAX}memory of a save / bytes", 1.0, "Orbax", _JAX)
    yield Aim("table jax", "JAX, * small leaves: blocked", 0.5, "Orbax", _TENSORS)


def _cold() -> Iterator[Aim]:
    for call in ("save", "load", "background", "import"):
        most = 1.2 if call == "background" else 1.0
        yield Aim("cold", f"1 x 16 MiB, first {call}: reknit over DCP", most, why=_MODULES)
    for call in ("save", "load"):
        yield Aim("cold", f"2 x 16 MiB, first {call}: reknit over DCP", 1.0, why=_MODULES)
    for call, most, process in (("background", 1.2, 1.5), ("resumed", 1.2, 1.0), ("prepared", 0.4, 1.0)):
        yield Aim("cold", f"2 x * MiB, first {call}: reknit over DCP", most, why=_AGENT)
        yield Aim("cold", f"2 x * MiB, first {call}: reknit over DCP's process", process, why=_AGENT)
    yield Aim("cold", "2 x 1024 MiB, first load: reknit over DCP", 0.8, why=_DISK)
    yield Aim("cold", "2 x 1024 MiB, first load, cold: reknit over DCP", 0.9, why=_DISK)
    yield Aim("cold", "import reknit, s", 0.005, why="modules of the public names")
    yield Aim("cold", "reknit --help, s", 0.08, why="the start of Python and the parser of all commands")
    yield Aim("cold", "import, modules of reknit", 60)
    yield Aim("cold", "idle agent, private MiB", 40)
    yield Aim("cold", "idle agent, threads", 4)


def _changed() -> Iterator[Aim]:
    for after in ("", ", after a restart"):
        yield Aim("unchanged", f"1 % changed{after}: bytes written / all", 0.02, why=_CHANGED)
        yield Aim("unchanged", f"1 % changed{after}: time / a save of all", 0.15, why=_CHANGED)


def _planning() -> Iterator[Aim]:
    for ranks, most in ((8_960, 1.0), (100_096, 12.0)):
        yield Aim("planning", f"load, {ranks} ranks: root, s of CPU", most, why=_ROOT)
    for job, first, again in (("megatron 8960", 0.3, 0.1), ("megatron 100096", 2.0, None)):
        yield Aim("planning", f"{job}: root in all, s of CPU", first)
        yield Aim("planning", f"{job}: manifest, KiB", 64)
        if again:
            yield Aim("planning", f"{job}: the same again, s of CPU", again)
    for job, most in (("fsdp2 1024 x 500", 0.5), ("fsdp2 1024 x 500 x 4", 1.0), ("megatron 8960", 1.0)):
        yield Aim("planning", f"{job}: root, s of CPU", most)
        yield Aim("planning", f"{job}: index, MiB", 2.0)
    yield Aim("planning", "megatron *: a rank's plan, s", 0.05)
    yield Aim("planning", "growth: k of (n log n)^k", 1.0)
    yield Aim("planning", "load, growth: k of (n log n)^k", 1.0, why=_ROOT)


def _loads() -> Iterator[Aim]:
    same, alone = "same layout", "one process"
    for kind, limit, most in (("cold", "raw read", 1.25), ("warm", "memcpy", 2.5)):
        yield Aim("load", f"{same}, {kind}: reknit / {limit}", most)
    for kind, least in (("cold", 1.5), ("warm", 3.0)):
        yield Aim("load", f"{same}, {kind}: DCP's best / reknit", least, least=True)
        yield Aim("load", f"{alone}, {kind}: DCP's best / reknit", least, least=True)
        yield Aim("load", f"{alone}, {kind}: safetensors' best / reknit", 1.0, least=True)
    yield Aim("load", "*: bytes read / needed, unverified", 1.05)
    yield Aim("load", "*: bytes read / (needed + 5 % + two blocks per run)", 1.0)
    yield Aim("load", "FSDP 4 to TP 2: DCP / reknit", 3.0, least=True)
    for part in ("1/8 of the rows", "1/8 of the columns", "one row"):
        yield Aim("load", f"* 4, {part}: DCP / reknit", 3.0, least=True)
    yield Aim("load", "*: bytes read / unique bytes, shared", 1.0)
    yield Aim("load", "* on 4 ranks, 200 MB/s per *: not shared / shared", 3.5, least=True)
    yield Aim("load", "*: auto / the quicker", 1.1)
    yield Aim("load", "*: extra memory of a rank / its budget", 1.0)


def _elsewhere() -> Iterator[Aim]:
    for what, why in (
        ("training stops", _STALL),
        ("a save from end to end", _DISK),
        ("a load, same layout", _DISK),
        ("a load, 2 ranks to 4", _DISK),
    ):
        yield Aim("paper stalls", f"{_STALLS}{what}", 0.7, "DCP", why)
    for place in ("hdfs", "s3"):
        for what in ("save", "load"):
            yield Aim("storage", f"{place} {what}: reknit / raw client", 0.95, why=_STORE, least=True)


AIMS = (*_single(), *_many_tensors(), *_jax(), *_cold(), *_changed(), *_planning(), *_loads(), *_elsewhere())
