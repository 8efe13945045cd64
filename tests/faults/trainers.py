"""The functions of forked processes in these tests: they train, save in the background, and write a log."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import reknit
from reknit.comm import group as comm
from reknit.comm.group import quietly
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.engine.background import link
from reknit.engine.memory.arena_pool import Arenas
from reknit.events.phase import Deadline
from reknit.options import CommOptions
from reknit.testing.faulty_storage import Fault
from tests.faults.nursery import agents_of, wait_until
from tests.storage.killpoint import faulty_url, register_faulty
from tests.warm.ahead import WITHOUT_TORCH, import_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.testing.faulty_storage import FaultKind

import_all(*WITHOUT_TORCH)  # once here, and not in every fork

COMM = CommOptions(bind="127.0.0.1", connect_timeout_s=30)
LEAKS_COMM = dataclasses.replace(COMM, fan_out=1)
PATIENCE_S = 30.0
"""The longest time that a rank waits for the others before it counts as one that hangs."""
OPTIONS = reknit.SaveOptions(
    durability="process", timeout_s=PATIENCE_S, comm=COMM, host_nbytes=256 << 20, on_error="warn"
)


def values(step: int, rank: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a tensor that differs in every element from that of other steps and ranks."""
    return np.arange(nbytes // 4, dtype=np.uint32) * 8 + (step * 2 + rank)


def state(step: int, size: int, nbytes: int, rank: int | None = None) -> dict[str, Any]:
    """Return the state of one rank, or of all: a large tensor of each, one that is shared, and values."""
    model: dict[str, Any] = {
        f"own.{r}": values(step, r, nbytes) for r in range(size) if rank is None or r == rank
    }
    return {"model": {**model, "all": np.full(5000, step)}, "extra": {"epoch": step}}


def step_path(root: str | Path, step: int) -> str:
    """Return the path to which a step is saved."""
    return f"{root}/steps/{step:03d}"


def lasting_path(root: str | Path, step: int) -> str:
    """Return the path to which a step is promoted."""
    return f"{root}/lasting/{step:03d}"


def found(path: str, size: int, nbytes: int) -> int | None:
    """Return the step of a checkpoint after a full check, None without a checkpoint."""
    try:
        report = reknit.verify(path, "data")
    except reknit.CheckpointNotFoundError:
        return None
    assert report.ok, report.problems
    step = reknit.open(path).manifest.step
    assert step is not None
    target, expected = state(255, size, nbytes), state(step, size, nbytes)
    reknit.load(path, target)
    assert target["extra"] == expected["extra"], path
    for name, array in expected["model"].items():
        assert np.array_equal(target["model"][name], array), f"{name} of {path} holds other values"
    return step


class Trainer:
    """A rank of a job that writes lines to a log."""

    def __init__(
        self, log: str, root: str, rank: int, size: int, nbytes: int = 0, options: CommOptions = COMM
    ) -> None:
        self.root, self.rank, self.size, self.nbytes = root, rank, size, nbytes
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        tempfile.tempdir = f"{root}/temporary"
        os.environ["TMPDIR"] = tempfile.tempdir
        register_faulty()
        self.group: Group | None = None
        if size > 1:
            with quietly():
                from reknit.comm.tree.tree_group import TreeGroup

            self.group = TreeGroup.join(FolderStore(f"{root}/meet"), rank, size, job="test", options=options)
        self.state = state(0, size, nbytes, rank)

    def say(self, *words: object) -> None:
        """Write a line to the log."""
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def meet(self) -> None:
        """Wait for the other ranks, as every step of a training does."""
        if self.group is not None:
            comm.barrier(self.group, "step", PATIENCE_S)

    def agree(self, well: bool, on: int) -> bool:
        """Return the value of `well` on rank `on`."""
        if self.group is None:
            return well
        with comm.turn(self.group, "step", PATIENCE_S) as turn:
            said = turn.gather(well)
            return turn.give_all(None if said is None else said[on], bool)

    def update(self, step: int) -> None:
        """Change the live state in place, which shows in the checkpoint if a copy comes too late."""
        self.state["model"][f"own.{self.rank}"][:] = values(step, self.rank, self.nbytes)
        self.state["model"]["all"][:] = step
        self.state["extra"]["epoch"] = step

    def save(self, step: int, *faults: Fault, options: reknit.SaveOptions = OPTIONS, **more: Any) -> Any:
        """Begin to save a step in the background."""
        path = step_path(self.root, step)
        gate = f"{self.root}/gate" if faults and any(f.kind == "stall" for f in faults) else ""
        url = faulty_url(path, *faults, gate=gate) if faults else path
        return reknit.save(url, self.state, step=step, wait=False, options=options, group=self.group, **more)

    def ended(self, step: int, pending: Any) -> bool:
        """Write the end of a save to the log, and return whether it succeeded."""
        try:
            report = pending.result(2 * PATIENCE_S)
        except reknit.ReknitError as error:
            self.say("failed", step, type(error).__name__, error.rank, error.phase, str(error).split("\n")[0])
            return False
        assert report.step == step
        self.say("committed", step)
        return True

    def promoted_with(self, step: int, faults: Sequence[Fault], gate: str = "") -> bool:
        """Save a step and have it promoted to a store with faults; return whether all ranks succeeded.

        The ends of both are written to the log.  A save that failed, since agents were lost, is made again.
        """
        path = lasting_path(self.root, step)
        options = dataclasses.replace(
            OPTIONS, promote_to=faulty_url(path, *faults, gate=gate) if faults else path
        )
        for _ in range(4):
            self.meet()
            self.update(step)
            pending = self.save(step, options=options)
            pending.staged(PATIENCE_S)
            self.say("staged", step)
            if self.agree(self.ended(step, pending), on=0):
                break
        try:
            pending.promoted(2 * PATIENCE_S)
            self.say("promoted", step)
        except reknit.ReknitError as error:
            self.say("unpromoted", step, type(error).__name__, error.rank)
        assert self.untouched(step)
        well = pending.promotion_error is None
        return all([self.agree(well, on=rank) for rank in range(self.size)])

    def untouched(self, step: int) -> bool:
        """Return whether the live state is still that of `update`."""
        model, rank = self.state["model"], self.rank
        own = np.array_equal(model[f"own.{rank}"], values(step, rank, self.nbytes))
        return own and bool((model["all"] == step).all()) and self.state["extra"] == {"epoch": step}


def train(log: str, root: str, rank: int, size: int, nbytes: int, steps: int) -> None:
    """Save several steps, each while the one before is perhaps still written, and then until one succeeds."""
    me = Trainer(log, root, rank, size, nbytes)
    before: tuple[int, Any] | None = None
    try:
        for step in range(steps):
            me.meet()
            me.update(step)
            me.say("begin", step)
            pending = me.save(step)
            pending.staged(PATIENCE_S)
            if pending.error is None:
                me.say("staged", step)
            if before is not None:
                me.ended(*before)
            before = step, pending
        if before is not None:
            me.ended(*before)
        me.say("trained")
        wait_until(lambda: os.path.exists(f"{root}/struck"), PATIENCE_S)
        for step in range(steps, steps + 5):
            me.meet()
            me.update(step)
            if me.ended(step, me.save(step)):
                break
    except reknit.CommError as error:  # another rank is gone, and so is the job
        me.say("alone", type(error).__name__)
        for at, one in () if before is None else (before,):
            me.ended(at, one)
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


def train_on(log: str, root: str, rank: int, size: int) -> None:
    """Save once; then save twice more, and go on with training without regard to the agents."""
    me = Trainer(log, root, rank, size, 1 << 20)
    me.ended(0, me.save(0))
    wait_until(lambda: os.path.exists(f"{root}/gate"), PATIENCE_S)
    pending = []
    for step in (1, 2):
        me.meet()
        me.update(step)
        pending.append(me.save(step))
        me.update(7)
    for _ in range(20):
        me.meet()
    me.say("trained")
    for step in (1, 2):
        me.ended(step, pending[step - 1])
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


def meet_faults(
    log: str, root: str, rank: int, size: int, kind: FaultKind, operation: str, victim: int, every: int = 1
) -> None:
    """Save again and again; the k-th operation, of so many, fails on one rank, until there is no k-th."""
    me = Trainer(log, root, rank, size, 1 << 20)
    for k in range(1, 60, every):
        me.meet()
        me.update(k)
        faults = [Fault(kind, k, operation or None)] if rank == victim else []
        well = me.ended(k, me.save(k, *faults))
        assert me.untouched(k)
        me.meet()
        if rank == 0:
            left = [name for _, _, names in os.walk(step_path(root, k)) for name in names]
            me.say("left", k, len(left))
        if me.agree(well, on=victim):
            break
        if k % 4 == 0:  # the next save clears away all that is left over
            assert me.ended(k, me.save(k, overwrite=True))
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


def save_often(log: str, root: str, rank: int, size: int, count: int, early: int) -> None:
    """Save many times; log the resources of this process and its agent after save `early` and the last."""
    me = Trainer(log, root, rank, size, 1 << 16)
    options = dataclasses.replace(OPTIONS, comm=LEAKS_COMM)
    before: dict[str, Held] = {}
    for number in range(1, count + 1):
        me.update(number)
        path = f"{root}/steps/{number % 3}"
        reknit.save(
            path, me.state, step=number, wait=False, overwrite=True, options=options, group=me.group
        ).result(PATIENCE_S)
        if number in (early, count):
            gc.collect()
            (agent,) = agents_of(os.getpid())
            for who, process in (("trainer", os.getpid()), ("agent", agent)):
                before[who] = at_rest(process, before.get(who))
                me.say(who, *before[who])
            # The ranks go on only when all have counted: a rank that is done closes its group and ends its
            # agent, and with these the others lose connections and threads.
            me.meet()
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


def promote_on(log: str, root: str, rank: int, size: int) -> None:
    """Save with promotions until one succeeds; that of the first save waits for the gate."""
    me = Trainer(log, root, rank, size, 1 << 20)
    for step in range(6):
        fault = [Fault("stall", 1, "finish")] if step == 0 else []
        if me.promoted_with(step, fault, gate=f"{root}/gate"):
            break
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


def close_early(log: str, root: str, rank: int, size: int) -> None:
    """Promote to a store that waits for a gate; rank 0 leaves meanwhile, and the others want to go on."""
    me = Trainer(log, root, rank, size, 1 << 20)
    to = faulty_url(lasting_path(root, 0), Fault("stall", 1, "finish"), gate=f"{root}/gate")
    pending = me.save(0, options=dataclasses.replace(OPTIONS, promote_to=to))
    me.ended(0, pending)
    if rank == 0:
        me.say("closed", reknit.close(0.1))
    me.meet()
    if rank != 0:
        me.ended(1, me.save(1))
        me.meet()
        Path(f"{root}/gate").touch()
    else:
        me.meet()
    me.say("promoted", pending.promoted(PATIENCE_S).num_files)
    me.say("closed", reknit.close(PATIENCE_S))
    wait_until(lambda: not agents_of(os.getpid()), PATIENCE_S)
    me.say("end")


def promote_at_faults(log: str, root: str, rank: int, size: int, kind: FaultKind, every: int) -> None:
    """Promote again and again; the k-th operation at the target fails on rank 0, until there is no k-th."""
    me = Trainer(log, root, rank, size, 1 << 20)
    for k in range(2, 60, every):  # the first is an operation of the trainer, which looks for a checkpoint
        faults = [Fault(kind, k)] if rank == 0 else []
        if me.promoted_with(k, faults):
            break
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


class Strikes:
    """A part of the state that kills its process, or the agent of that, when `state_dict` is called."""

    def __init__(self, victim: str) -> None:
        self._victim = victim

    def state_dict(self) -> dict[str, Any]:
        victim = os.getpid()
        if self._victim == "agent":
            deadline = time.monotonic() + PATIENCE_S
            while len(agents := agents_of(os.getpid())) != 1:  # it may still be starting
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (victim,) = agents
        os.kill(victim, signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def save_with_stopped_agents(
    log: str, root: str, rank: int, size: int, connect_s: float = PATIENCE_S
) -> None:
    """Save for the first time, on one host, while the agents are stopped before they run any code."""
    start = link.AgentLink.spawn

    def stopped(*arguments: Any) -> Any:
        process = start(*arguments)
        process.send_signal(signal.SIGSTOP)
        return process

    link.AgentLink.spawn = stopped  # type: ignore[assignment, method-assign]
    on_one_host = CommOptions(connect_timeout_s=connect_s)
    me = Trainer(log, root, rank, size, 1 << 20, on_one_host)
    # Longer than a test waits: only the time to connect may end a save.
    pending = me.save(0, options=dataclasses.replace(OPTIONS, comm=on_one_host, timeout_s=20 * PATIENCE_S))
    me.update(1)
    me.say("saved")
    me.ended(0, pending)
    me.say("closed", reknit.close(PATIENCE_S))


def prepare_and_lose(log: str, root: str, rank: int, size: int, victim: str, late: bool) -> None:
    """Prepare for saves, while rank 1 loses its agent or dies: before its part, or `late`, in it."""
    me = Trainer(log, root, rank, size, 1 << 20)
    options = dataclasses.replace(OPTIONS, on_error="raise")
    state = me.state
    if rank == 1 and late:
        acquire = Arenas.acquire

        def strike(self: Arenas, nbytes: int, timeout_s: float) -> Any:
            lease = acquire(self, nbytes, timeout_s)
            Arenas.acquire = acquire  # type: ignore[method-assign]
            Strikes(victim).state_dict()
            return lease

        Arenas.acquire = strike  # type: ignore[method-assign]
    elif rank == 1:
        state = {**me.state, "strikes": Strikes(victim)}
    try:
        reknit.prepare(f"{root}/steps", state, options=options, group=me.group)
    except reknit.ReknitError as error:
        me.say("failed", type(error).__name__)
    if victim == "agent":
        me.meet()
        # A save that meets the loss may fail; the next but one is well.
        for step in range(3):
            well = me.ended(step, me.save(step))
        assert well
    me.say("closed", reknit.close(PATIENCE_S))
    me.say("end")


class Held(NamedTuple):
    """The resources of a process; `memory_files` counts its mappings of nameless memory."""

    resident_kib: int
    descriptors: int
    threads: int
    memory_files: int


def at_rest(pid: int, before: Held | None) -> Held:
    """Return the resources of a process once they, without its memory, were the same in twenty looks.

    After the end of a save its agent has yet to close the store, and a thread that was joined may not have
    left the kernel.  Threads in excess of `before` have some seconds to end: a thread that stays longer is
    taken to stay for good.
    """
    looks: list[Held] = []
    going = Deadline(5.0)

    def same() -> bool:
        looks.append(held(pid))
        time.sleep(0.005)
        more = before is not None and looks[-1].threads > before.threads and not going.passed()
        return not more and len(looks) >= 20 and len({look[1:] for look in looks[-20:]}) == 1

    wait_until(same, PATIENCE_S, lambda: f"process {pid} does not come to rest: {looks[-20:]}")
    return looks[-1]


def held(pid: int) -> Held:
    """Return the resources of a process at this moment, without the threads of gRPC's own pool.

    The pool grows on a busy machine, and takes long to shrink.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    threads = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # the thread has ended meanwhile
            threads += Path(f"/proc/{pid}/task/{thread}/comm").read_text() != "event_engine\n"
    return Held(int(fields["VmRSS"].split()[0]), descriptors, threads, maps)
