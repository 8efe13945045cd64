"""Kinds of processes that save: each makes the same saves to the same stores, and writes down how they ended.

``python -m tests.faults.process_kinds KIND FOLDER`` is a process of one kind, or starts one.
"""

from __future__ import annotations

import asyncio
import atexit
import code
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import factories, register
from tests.storage.process_memory import open_process_memory

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 40.0
"""The longest time of a case.  The timeouts of the saves are longer: a save that waits for one hangs."""

_OPTIONS = reknit.SaveOptions(durability="process", timeout_s=300, exit_wait_s=300)
_NUMEL = 1 << 18
_SLOW_S = 0.3

STORES = {
    "path": "{folder}/{name}",
    "mem": "mem://kinds-{folder.name}/{name}",
    "process": "process://kinds/{name}",
    "memory": "memory://kinds/{name}",
    "registered": "registered://{folder}/{name}",
}
"""Two stores that any process of this machine finds, two that end with this one, and one of its own scheme.

The order matters: when a process ends right after its saves, that to the last store is still under way.
"""

OUTLIVE = ("path", "mem", "registered")


def stored(folder: Path, store: str, name: str) -> str:
    """Return the place of a case's checkpoint; one of the registered scheme is found at its path."""
    return STORES["path" if store == "registered" else store].format(folder=folder, name=name)


def weight(name: str) -> np.ndarray[Any, Any]:
    """Return the tensor of a case, which differs from that of all others."""
    return np.arange(_NUMEL, dtype=np.int32) + sum(name.encode())


def whole(url: str, name: str) -> bool:
    """Return whether the checkpoint of a case exists and is whole."""
    target = {"model": {"weight": np.zeros(_NUMEL, np.int32)}}
    try:
        reknit.load(url, target)
    except reknit.CheckpointNotFoundError:
        return False
    return bool((target["model"]["weight"] == weight(name)).all())


class Cases:
    """The saves that each kind of process makes, and the log of how they ended."""

    def __init__(self, folder: Path, kind: str, only: str = "") -> None:
        self.folder, self.kind = folder, kind
        self._only = only

    def note(self, *words: str) -> None:
        """Add a line to the log, to which processes and threads write at once."""
        with open(self.folder / "log", "ab", buffering=0) as log:
            log.write(" ".join(words).replace("\n", " ").encode() + b"\n")

    def watch(self) -> None:
        """Dump all stacks and end this process, unless it calls this again before the deadline."""
        stacks = open(self.folder / f"stacks-{os.getpid()}", "a")  # noqa: SIM115 - written to until the end
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=stacks)

    def run(self, *, dies: bool = False) -> None:
        """Make the saves here; a process that `dies` without an end waits for those in its memory."""
        _register()
        for store in STORES:
            for wait in (True, False):
                name = f"{store}-{'wait' if wait else 'no-wait'}"
                if self._only in ("", name):
                    self.watch()
                    self.note("begin", name)
                    self.note("ended", name, self._saved(store, name, wait, dies))
        self.watch()

    def _saved(self, store: str, name: str, wait: bool, dies: bool) -> str:
        url = STORES[store].format(folder=self.folder, name=name)
        try:
            pending = reknit.save(url, {"model": {"weight": weight(name)}}, wait=wait, options=_OPTIONS)
            if store not in OUTLIVE or (dies and store == "registered") or pending.error is not None:
                pending.result()
            found = store in OUTLIVE or whole(url, name)
        except reknit.ReknitError as error:
            return f"refused {type(error).__name__}: {error}"
        except BaseException as error:
            return f"foreign {type(error).__name__}: {error}"
        return "saved" if found else "lost"


# Kinds of processes.


def alone(cases: Cases) -> None:
    """Save in the main thread."""
    cases.run()


def in_thread(cases: Cases, *, daemon: bool) -> None:
    """Save in a thread that ends."""
    thread = threading.Thread(target=cases.run, daemon=daemon)
    thread.start()
    thread.join()


def in_process(cases: Cases, method: str, *, daemon: bool = False, before: str = "") -> None:
    """Save in a process of `multiprocessing`."""
    _prepare(cases, before)
    process: Any = multiprocessing.get_context(method).Process(target=cases.run, daemon=daemon)  # type: ignore[attr-defined]
    process.start()
    process.join()
    cases.note("code", str(process.exitcode))


def terminated(cases: Cases, method: str) -> None:
    """Save in a process that is ended as soon as it has saved, as daemonic ones are."""
    context: Any = multiprocessing.get_context(method)
    reported = context.Event()
    process = context.Process(target=_save_and_stay, args=(cases, reported), daemon=True)
    process.start()
    reported.wait()
    process.terminate()
    process.join()


def _save_and_stay(cases: Cases, reported: Any) -> None:
    cases.run(dies=True)
    reported.set()
    threading.Event().wait()


def in_pool(cases: Cases, method: str) -> None:
    """Save in a worker of a pool, which is terminated."""
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.apply(partial(cases.run, dies=True))


def forked(cases: Cases, *, before: str = "") -> None:
    """Save in a process of `os.fork`, which then ends by itself."""
    _prepare(cases, before)
    pid = os.fork()
    if not pid:
        cases.run()
        sys.exit(0)
    cases.note("code", str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def forked_in_thread(cases: Cases) -> None:
    """Save in a process that a thread forks."""
    thread = threading.Thread(target=in_process, args=(cases, "fork"), kwargs={"before": "saved"})
    thread.start()
    thread.join()


def _prepare(cases: Cases, before: str) -> None:
    """Let the parent of a process save first, if and as `before` says."""
    _register()
    for store in OUTLIVE if before else ():
        url = STORES[store].format(folder=cases.folder, name=f"parent-{store}")
        pending = reknit.save(url, {"model": {"weight": weight("parent")}}, wait=False, options=_OPTIONS)
        if before == "saved":
            pending.result()


def in_running_loop(cases: Cases) -> None:
    """Save in a coroutine, which blocks its loop."""

    async def main() -> None:
        cases.run()

    asyncio.run(main())


def beside_running_loop(cases: Cases) -> None:
    """Save in a thread of a loop."""
    asyncio.run(asyncio.to_thread(cases.run))


def in_loop_of_thread(cases: Cases) -> None:
    """Save in a coroutine of a loop that runs in a thread."""
    thread = threading.Thread(target=in_running_loop, args=(cases,))
    thread.start()
    thread.join()


def in_notebook(cases: Cases) -> None:
    """Save in a cell, as the kernel of a notebook runs it: in a loop, in a module without a file."""
    import types

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    shell = code.InteractiveInterpreter(vars(main))

    async def cell() -> None:
        main.__dict__["cases"] = cases
        for line in ("import reknit", "x = reknit.SaveOptions()", "cases.run()"):
            shell.runsource(line)

    asyncio.run(cell())


class Signalling:
    """A state that sends a signal to its process when its values are saved or loaded."""

    def state_dict(self) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"number": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


class SlowStorage(LocalStorage):
    """A store that is slow to commit: a process that does not wait for its own saves loses them."""

    def commit(self, *args: Any, **keywords: Any) -> bool:
        time.sleep(_SLOW_S)
        return super().commit(*args, **keywords)


class SignallingStorage(LocalStorage):
    """A store that sends a signal to its process when a thread of the save begins a file."""

    def create(self, path: str, nbytes: int) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return super().create(path, nbytes)


INTERRUPTED = ("nothing", "collect", "write", "load", "collect, no wait", "write, no wait")


def in_handler(cases: Cases, inside: str) -> None:
    """Save in the handler of a signal, which comes `inside` another call."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    register("signals", lambda url, durability: SignallingStorage(url.partition("://")[2]))
    place, state = f"signals://{cases.folder}/interrupted", dict[str, Any](a={"x": 1})
    reknit.save(cases.folder / "earlier", {"a": Signalling()}, options=_OPTIONS)

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one signal is enough
        cases.run()

    signal.signal(signal.SIGUSR1, handle)
    call, _, no_wait = inside.partition(", ")
    try:
        if call == "nothing":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif call == "load":
            reknit.load(cases.folder / "earlier", {"a": Signalling()})
        else:
            if call == "collect":
                place, state = f"registered://{cases.folder}/interrupted", {"a": Signalling()}
                _register()
            reknit.save(place, state, wait=not no_wait, options=_OPTIONS).result()
    except reknit.ReknitError as error:
        cases.note("interrupted", f"{type(error).__name__}: {error}")


def at_exit(cases: Cases, before: str = "") -> None:
    """Save at the end of the interpreter, before reknit waits for its saves."""
    _prepare(cases, before)
    atexit.register(cases.run)


def last_at_exit(cases: Cases) -> None:
    """Save at the end of the interpreter, after reknit has waited: the function was registered first."""
    atexit.register(cases.run)
    _prepare(cases, "saved")


def _register() -> None:
    """Register the stores that only this process can open, as a program does in each process that saves."""
    if "registered" not in factories:
        register("process", lambda url, durability: open_process_memory(url))
        register("registered", lambda url, durability: SlowStorage(url.partition("://")[2]))


KINDS: dict[str, Callable[[Cases], None]] = {
    "main thread": alone,
    "thread": partial(in_thread, daemon=False),
    "daemonic thread": partial(in_thread, daemon=True),
    **{method: partial(in_process, method=method) for method in ("fork", "spawn", "forkserver")},
    **{f"daemonic {m}": partial(in_process, method=m, daemon=True) for m in ("fork", "spawn", "forkserver")},
    **{f"terminated {m}": partial(terminated, method=m) for m in ("fork", "spawn")},
    **{f"pool of {m}": partial(in_pool, method=m) for m in ("fork", "spawn")},
    "fork after saves": partial(in_process, method="fork", before="saved"),
    "fork during saves": partial(in_process, method="fork", before="saving"),
    "os.fork": forked,
    "os.fork after saves": partial(forked, before="saved"),
    "os.fork during saves": partial(forked, before="saving"),
    "fork in a thread": forked_in_thread,
    "running loop": in_running_loop,
    "thread of a loop": beside_running_loop,
    "loop of a thread": in_loop_of_thread,
    "notebook": in_notebook,
    **{f"handler during {call}": partial(in_handler, inside=call) for call in INTERRUPTED},
    "at exit": at_exit,
    "at exit after saves": partial(at_exit, before="saved"),
    "last at exit": last_at_exit,
}


def main(kind: str, folder: str, only: str = "") -> None:
    """Save as a process of a kind, or start one."""
    warnings.simplefilter("ignore")  # Python warns of forks where there are threads
    cases = Cases(Path(folder), kind, only)
    cases.watch()
    # A process that is forked while the watch has a thread would wait for it for ever.
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=cases.watch)
    KINDS[kind](cases)


if __name__ == "__main__":
    main(*sys.argv[1:])
