"""A job of many ranks in one thread, on a virtual network, disk and clock: every run of a seed is the same.

The ranks run the real code of a save: `engine.save`, the coordinator, the planner, the formats, and for each
round `comm.tree.machine.RoundMachine`.  Around them everything is virtual, and anything may go wrong.
Needs the package greenlet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random
from shlex import quote
from typing import TYPE_CHECKING

from reknit.comm.group import Topology
from reknit.events.phase import CLOCK
from reknit.testing.faulty_storage import FaultyStorage
from tests.simulation.clock import Schedule, Violation
from tests.simulation.faults import (
    AT_STEP,
    Crash,
    Cut,
    DiskFault,
    Interrupt,
    Partition,
    Restart,
    SimFault,
    Stop,
    Weather,
)
from tests.simulation.group import SimGroup
from tests.simulation.job import Ending, Save, Worker, one_thread
from tests.simulation.network import Network
from tests.simulation.oracle import Commit, Oracle
from tests.simulation.process import Process
from tests.simulation.storage import Disk, SimStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.storage.base import Storage

__all__ = [
    "Crash",
    "Cut",
    "DiskFault",
    "Interrupt",
    "Partition",
    "Restart",
    "Result",
    "Save",
    "Stop",
    "Violation",
    "Weather",
    "simulate",
]

_IMPORTS = (
    "from math import inf; from reknit.testing.faulty_storage import Fault; "
    "from tests.simulation.simulator import *"
)

HORIZON_S = 1e5
"""Virtual seconds after which nothing may happen any more."""
DISK_S = 0.002
"""The average time of a request to the disk, and of its answer."""


@dataclass(frozen=True, slots=True)
class Result:
    """The course of a run: outcomes of saves by rank, committed saves, and the steps of each rank.

    `steps` are by incarnation and rank; `fired` is whether all faults that were planned for a step or a
    storage operation happened.
    """

    endings: tuple[Ending, ...]
    commits: tuple[Commit, ...]
    steps: dict[tuple[int, int], int]
    fired: bool
    events: int
    seconds: float
    trace_digest: int

    def outcomes(self, run: int = 0) -> dict[tuple[int, int], str]:
        """Return the outcomes by save and rank: ``"ok"``, or the name of an error."""
        return {(e.number, e.rank): e.outcome for e in self.endings if e.run == run}


def simulate(
    seed: int,
    *,
    ranks: int,
    fan_out: int = 16,
    hosts: int | Sequence[int] | None = None,
    saves: int | Sequence[Save] = 1,
    faults: Sequence[SimFault] = (),
    timeout_s: float = 30.0,
    recover: bool = True,
) -> Result:
    """Run a job of `ranks` ranks that makes some saves, each over the previous one, and judge all events.

    `hosts` is the number of hosts, over which the ranks are spread in blocks, or each rank's host; None gives
    each rank a host of its own.  In the end, unless `recover` is false, the job is started once more without
    faults, and must save; then no effects of the faults may remain.

    Raises `Violation`, an `AssertionError`, when a forbidden event happens (see `Oracle`).  Its message has
    the call that repeats it, and the last events.
    """
    wanted = (Save(),) * saves if isinstance(saves, int) else tuple(saves)
    call = (
        f"simulate({seed}, ranks={ranks}, fan_out={fan_out}, hosts={hosts!r}, saves={saves!r}, "
        f"faults={faults!r}, timeout_s={timeout_s!r}, recover={recover!r})"
    )
    world = _World(Random(seed), Topology(_hosts(ranks, hosts), fan_out), wanted, tuple(faults), timeout_s)
    token = CLOCK.set(world.schedule)
    try:
        with one_thread(world.random):
            return world.run(recover)
    except Exception as error:  # so that any error has the call that repeats it
        raise Violation(
            f"{type(error).__name__}: {error}\n\n"
            f"To repeat it:\n  python -c {quote(f'{_IMPORTS}; {call}')}\n\n"
            f"The last events:\n{world.schedule.trace()}"
        ) from error
    finally:
        CLOCK.reset(token)
        world.clear()


def _hosts(ranks: int, hosts: int | Sequence[int] | None) -> Sequence[int]:
    if hosts is None:
        return range(ranks)
    if isinstance(hosts, int):
        return [rank * hosts // ranks for rank in range(ranks)]
    return hosts


@dataclass
class _World:
    """Everything of one simulation."""

    random: Random
    topology: Topology
    saves: tuple[Save, ...]
    faults: tuple[SimFault, ...]
    timeout_s: float
    schedule: Schedule = field(default_factory=Schedule)
    processes: dict[tuple[int, int], Process] = field(default_factory=dict)
    disk_faults: list[tuple[FaultyStorage, int]] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        weather = [fault for fault in self.faults if isinstance(fault, Weather)]
        self.network = Network(self.schedule, self.random, weather[-1] if weather else Weather())
        self.disk = Disk(self.random, DISK_S)
        on_root = [f for f in self.faults if isinstance(f, DiskFault) and f.rank == 0]
        self.oracle = Oracle(self.disk, root_can_read=len(on_root) < 2)
        self.disk.changed = self.oracle.changed

    def run(self, recover: bool) -> Result:
        """Run all events, and judge them."""
        self._start(self.saves, self.faults)
        for fault in self.faults:
            if isinstance(fault, Restart):
                self.schedule.at(fault.at_s, lambda: self._start(self.saves, self.faults))
            elif isinstance(fault, Partition):
                self.schedule.at(fault.at_s, partial(self.network.part, fault))
        self.schedule.run(until_s=HORIZON_S)
        self._judge()
        fired = all(process.unstruck == 0 for process in self.processes.values()) and all(
            len(disk.fired) == planned for disk, planned in self.disk_faults
        )
        if recover:
            self._recover()
        return Result(
            tuple(self.oracle.endings),
            tuple(self.oracle.commits),
            {who: process.steps for who, process in self.processes.items()},
            fired,
            self.schedule.events,
            self.schedule.moment,
            self.schedule.trace_digest,
        )

    def clear(self) -> None:
        """Clear away the rest of the processes."""
        for process in self.processes.values():
            process.unwind()

    def _start(self, saves: tuple[Save, ...], faults: Sequence[SimFault]) -> None:
        """Start the job, with a generation above all earlier ones."""
        run, self.runs = self.runs, self.runs + 1
        for rank in range(self.topology.size):
            mine = [
                f for f in faults if isinstance(f, (*AT_STEP, DiskFault)) and (f.run, f.rank) == (run, rank)
            ]
            plan: dict[int, list[Callable[[Process], None]]] = {}
            for fault in mine:
                if not isinstance(fault, DiskFault):
                    plan.setdefault(fault.step, []).append(partial(fault.strike, network=self.network))
            process = Process(self.schedule, run, rank, plan)
            self.processes[run, rank] = process
            group = SimGroup(process, self.network, self.topology, rank, run=run, generation=run + 1)
            group.on_exchange = self.oracle.round_over
            storage = self._storage(process, [f for f in mine if isinstance(f, DiskFault)])
            worker = Worker(group, storage, saves, self.timeout_s, self.random, self.oracle.saved)
            process.start(worker.work)

    def _storage(self, process: Process, faults: Sequence[DiskFault]) -> Storage:
        disk = SimStorage(self.disk, process)
        if not faults:
            return disk
        stalls = iter([f.stall_s for f in faults if f.fault.kind == "stall"])

        def kill() -> None:
            process.die(silent=False)
            process.hold()

        faulty = FaultyStorage(
            disk, plan=[f.fault for f in faults], stall=lambda: process.sleep(next(stalls)), kill=kill
        )
        self.disk_faults.append((faulty, len(faults)))
        return faulty

    def _judge(self) -> None:
        """Judge the state after all events."""
        live = {who for who, process in self.processes.items() if process.live}
        hanging = sorted(who for who in live if not self.processes[who].ended)
        if hanging:
            raise Violation(f"these ranks (incarnation, rank) wait for ever: {hanging[:16]}")
        plain = [isinstance(f, DiskFault) and f.fault.kind not in ("stall", "kill") for f in self.faults]
        self.oracle.settled(live, same_error=any(plain) and all(plain))
        newest = self.runs - 1
        befell = [f for f in self.faults if not isinstance(f, (*AT_STEP, DiskFault)) or f.run == newest]
        if sum(map(self._delay_s, befell)) < self.timeout_s / 2:
            self.oracle.all_well(newest, self.saves)

    def _delay_s(self, fault: SimFault) -> float:
        """Return the longest delay by a fault of the newest incarnation, infinity if it can break it."""
        if isinstance(fault, Weather):
            slowest_s = max(fault.delay_s, fault.slow_s if fault.slow else 0.0)
            return inf if fault.lost else slowest_s * (8 + self.topology.height)
        if isinstance(fault, Stop):
            return fault.seconds
        if isinstance(fault, Partition):
            return fault.seconds if fault.kept else inf
        if isinstance(fault, DiskFault):
            return fault.stall_s if fault.fault.kind == "stall" else inf
        return 0.0 if isinstance(fault, Restart) else inf

    def _recover(self) -> None:
        """Start the job once more when everything works again."""
        self.network.heal()
        saves = tuple(Save(folder) for folder in dict.fromkeys(save.folder for save in self.saves))
        self._start(saves, ())
        self.faults = ()
        self.saves = saves
        self.schedule.run(until_s=self.schedule.moment + HORIZON_S)
        self._judge()
        self.oracle.tidy()
