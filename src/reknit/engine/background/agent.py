"""The agent process: writes and commits staged saves, outlives the trainer, and exits when it is done.

``python -m reknit.engine.background.agent`` is started by a trainer with one end of a pair of sockets.
It does not import torch, and it writes a staged checkpoint even if the trainer dies.  For a store that only
the trainer's process can open, the same code runs in threads of the trainer.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from reknit.comm.group import Group, SoloGroup
from reknit.engine.background import messages
from reknit.engine.background.lanes import Lanes, joining, work
from reknit.engine.stored.agents import Note
from reknit.errors import AgentError, GroupClosedError, ReknitError, from_wire, typed
from reknit.options import CommOptions, SaveOptions
from reknit.processes.channel import Channel, Message, map_file
from reknit.system import start_thread
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.comm.tree.tree_group import TreeGroup
    from reknit.engine.background.agent_save import AgentSave, AgentState, WarmUp
    from reknit.engine.background.lanes import Jobs, PromotionLane
    from reknit.processes.shared_memory import SharedMemory

logger = logging.getLogger("reknit")

_LOOK_S = 1.0
"""Seconds between two checks whether the trainer is still the parent of this process."""
_GRACE_S = 60.0
_LOW_NICE = 10


class Agent:
    """The work of one rank's agent, in a process of its own or in a thread of the trainer."""

    def __init__(self, channel: Channel, trainer: int | None) -> None:
        """Serve `channel`; `trainer` is the process id of the trainer, or None in a thread of the trainer."""
        self._channel = channel
        self._trainer = trainer
        self._rank = 0
        self._port: TreeGroup | None = None
        self._group: Group = SoloGroup()
        self._lanes = Lanes()
        self._comm = CommOptions()
        self._arenas: dict[int, SharedMemory] = {}
        self.saves: dict[int, AgentSave] = {}
        self._note = None if trainer is None else Note()
        self._values: dict[int, dict[int, memoryview]] = {}
        self._longest_s = 0.0
        self._to_write: Jobs = queue.SimpleQueue()
        self._to_commit: Jobs = queue.SimpleQueue()
        self._handlers: dict[type[Message], Callable[..., None]] = {
            messages.Join: self._join,
            messages.ConnectParent: self._connect_parent,
            messages.GiveArena: self._take_arena,
            messages.DropArenas: self._drop,
            messages.ShareValues: self._map_values,
            messages.Begin: self._begin,
            messages.Planned: self._plan,
            messages.Filled: self._fill,
            messages.Ready: self._make_ready,
            messages.Abandon: self._abandon,
        }

    def run(self) -> None:
        """Serve until the trainer quits or dies, and then write all staged saves."""
        # In this order, and the lanes last, since a committed checkpoint may have to be promoted.
        queues = {"write": self._to_write, "commit": self._to_commit}
        workers: dict[str, threading.Thread] = {}
        announced = True
        try:
            for name, jobs in queues.items():
                workers[name] = start_thread(f"reknit-agent-{name}", partial(work, jobs))
            announced = self._serve()
        except BaseException as error:  # an exit status would not show the cause
            self._channel.try_send(messages.AgentFailed(typed(error).to_wire()))
            raise
        finally:
            self.outlive(announced=announced)  # also after a bug: no thread may wait forever for a message
            for name, jobs in queues.items():
                jobs.put(None)
                if name in workers:  # else it could not be started
                    workers[name].join()
            self._group.close()  # at once: another rank's next save must not wait for promotions
            self._lanes.end()
            for arena in self._arenas.values():
                arena.close()
            if self._note is not None:
                self._note.close()
            self._channel.close()

    def _serve(self) -> bool:
        """Receive messages until the end; return whether the trainer announced it, instead of dying."""
        while True:
            if not self._channel.wait(_LOOK_S):
                # A process that the trainer forked may hold its end of the socket open.
                if self._trainer is not None and os.getppid() != self._trainer:
                    return False
                continue
            received = self._channel.receive()
            if received is None:
                return False
            if isinstance(received.message, messages.Quit):
                return True
            # Some messages come with a descriptor.
            fds = () if received.fd is None else (received.fd,)
            self._handlers[type(received.message)](received.message, *fds)

    def outlive(self, *, announced: bool) -> None:
        """Fail the saves whose staging is incomplete, and limit the time of the others."""
        left = list(self.saves.values())
        for save in left:
            if not save.staged:
                save.fail(
                    AgentError(
                        f"the process of rank {self._rank} ended before its state was staged; "
                        "nothing was committed",
                        rank=self._rank,
                        phase="stage",
                    )
                )
        if self._trainer is None:
            return
        if not announced and left:
            logger.warning("the process of rank %d ended; its agent finishes %d saves", self._rank, len(left))
        # A hanging store must not keep the agent alive forever.
        times = 1 + sum(len(save.promotions.left) for save in left)
        limit_s = times * self._longest_s + _GRACE_S
        watchdog = threading.Timer(limit_s, os._exit, (1,))
        watchdog.daemon = True
        try:
            watchdog.start()
        except RuntimeError:  # no further thread: staged saves are written without a limit
            signal.alarm(math.ceil(limit_s))

    def _join(self, join: messages.Join, door: int | None = None) -> None:
        self._rank = join.rank
        if join.low_priority and self._trainer is not None:
            with suppress(OSError):  # a sandbox may refuse even this
                os.nice(_LOW_NICE)
        if len(join.hosts) == 1:
            self._group = SoloGroup(join.generation)
            return
        self._comm = CommOptions(**join.comm)
        port = joining(join, door)
        self._group = self._port = port
        if port.address and door is None:
            self._channel.try_send(messages.Listening(port.address))

    def _connect_parent(self, connect: messages.ConnectParent) -> None:
        port = self._port
        if port is not None:
            try:
                port.connect_parent(connect.above)
            except ReknitError as error:  # it must not be alone in its saves, so it ends
                port.rounds.break_off(error)
                raise
            send = self._channel.try_send
            port.on_broken(lambda error: send(messages.Broken(isinstance(error, GroupClosedError))))
            # The trainer of an agent that never runs sends its error, unless that is gone as well.
            self._to_commit.put(port.await_below)
        self._channel.try_send(messages.Joined())

    def _take_arena(self, given: messages.GiveArena, fd: int) -> None:
        from reknit.processes.shared_memory import SharedMemory  # brings NumPy, as `_maker` does

        self._arenas[given.number] = SharedMemory(fd, given.nbytes)

    def _drop(self, drop: messages.DropArenas) -> None:
        for number in drop.numbers:
            self._arenas.pop(number).close()

    def _map_values(self, lend: messages.ShareValues, fd: int) -> None:
        """Map values of a save that is about to begin."""
        try:
            memory = memoryview(map_file(fd, lend.nbytes))
        finally:
            os.close(fd)
        views = {number: memory[begin:end] for number, begin, end in lend.blobs}
        self._values.setdefault(lend.number, {}).update(views)

    def _begin(self, begin: messages.Begin) -> None:
        for number, view in self._values.pop(begin.number, {}).items():
            begin.claims.blobs[number].data = cast("bytes", view)  # its readers treat a view as bytes
        options = SaveOptions(**begin.options)
        try:
            save = self._maker.save(begin, options, self._group, list(self.saves.values()))
        except ReknitError as error:
            self._refuse(begin.number, error, options.timeout_s)
        else:
            self.take_up(save, options.timeout_s)

    @lazy_property
    def _maker(self) -> AgentState:
        # Trainers wait for agents to join, and not for these imports: see `AgentLink` for threads.
        from reknit.engine.background.agent_save import AgentState

        if self._rank == 0:
            self._to_commit.put(_load_index_code)
        return AgentState(self._channel.try_send)

    def take_up(self, save: AgentSave, timeout_s: float) -> None:
        """Queue a save for the workers, after all earlier saves."""
        group = self._group
        # A commit to a path removes all other files there, so no later save may have written there yet.
        earlier = [e for e in list(self.saves.values()) if e.url == save.url]
        self.saves[save.number] = save
        save.note_end = partial(self._note_end, save)
        self._note_saves()
        self._longest_s = max(self._longest_s, timeout_s)

        def commit() -> None:
            save.commit()
            if save.promotes:
                self._promote(save, group, timeout_s)

        before = earlier[-1] if earlier else None
        self._to_write.put(lambda: save.write(before))
        self._to_commit.put(commit)

    def _promote(self, save: AgentSave, group: Group, timeout_s: float) -> None:
        """Pass a committed save to the lanes.  Does not raise, since later saves need this thread."""

        def promote(target: int, lane: PromotionLane) -> None:
            save.promotions.promote(target, lane.group, len(self._lanes))

        def give_up(targets: Iterable[int], error: BaseException) -> None:
            for target in targets:
                save.promotions.fail(target, error)

        try:
            numbers = self._lanes.agree(save.promotions.targets, group, timeout_s)
        except BaseException as error:
            give_up(range(len(save.promotions.targets)), error)
            return
        lanes: list[tuple[int, PromotionLane]] = []
        for target, number in enumerate(numbers):
            try:
                lanes.append((target, self._lanes.lane(number, group, self._comm, timeout_s)))
            except BaseException as error:
                give_up([target], error)
        for target, lane in lanes:  # after all are formed, since they share the memory of one save
            lane.jobs.put(partial(promote, target, lane))

    def _refuse(self, number: int, error: ReknitError, timeout_s: float) -> None:
        """Make this save raise, on all ranks, the error that kept it from beginning here."""
        group = self._group
        self._longest_s = max(self._longest_s, timeout_s)

        def refuse_everywhere() -> None:
            from reknit.engine.background.agent_save import refuse

            try:
                refuse(number, error, group, timeout_s)
            except BaseException as announced:  # that of another rank, perhaps
                self._channel.try_send(messages.SaveDone(number, typed(announced).to_wire()))

        self._channel.try_send(messages.ArenaFree(number))
        self._to_commit.put(refuse_everywhere)

    def _note_saves(self) -> None:
        """Record the saves of this process in its note, for other processes."""
        if self._note is not None:
            self._note.write(self._rank, self.saves)

    def _note_end(self, save: AgentSave) -> None:
        """Record that a save, or one of its promotions, has ended."""
        if save.over.is_set():
            self.saves.pop(save.number, None)
        self._note_saves()

    def _plan(self, planned: messages.Planned) -> None:
        if (save := self.saves.get(planned.number)) is not None:
            save.take_files(planned, self._arenas[planned.arena])

    def _fill(self, filled: messages.Filled) -> None:
        if (save := self.saves.get(filled.number)) is not None:  # else it failed, and is over
            save.note_filled(filled.span)

    def _make_ready(self, ready: messages.Ready) -> None:
        if (warm_up := self.saves.get(ready.number)) is not None:  # else it failed, and is over
            cast("WarmUp", warm_up).make_ready()

    def _abandon(self, abandon: messages.Abandon) -> None:
        self._values.pop(abandon.number, None)
        error = from_wire(abandon.error)
        save = self.saves.get(abandon.number)
        if save is not None:
            save.fail(error)
        elif abandon.unbegun:
            self._refuse(abandon.number, error, abandon.timeout_s)


def _load_index_code() -> None:
    """Import the modules of a commit ahead of it; the commit itself raises their errors."""
    with suppress(Exception):
        import reknit.format.index  # noqa: F401


def main(fd: int, trainer: int) -> None:
    """Serve the trainer at the other end of a socket, and outlive it."""
    for number in messages.FOR_TRAINERS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, messages.FOR_TRAINERS)
    logging.basicConfig(format="%(name)s: %(message)s")
    Agent(Channel(socket.socket(fileno=fd), messages.decode), trainer).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
