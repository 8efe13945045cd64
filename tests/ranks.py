"""Real processes for tests: `run(world, fn, *args)` calls a function on every rank of a real gloo group.

Ranks are forked from a process without threads that has already imported torch and a module of `tests.warm`,
which imports a framework.  So a test with two ranks takes well under a second.  The first `run` of a session
with such a module starts that process, which takes a few seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from reknit.events.phase import Deadline
from tests.shared_servers import FOLDER, connected, grown, serve_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.shared_servers import ForkedServer

_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": "0"}
_LEAVES_A_CORE = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

_ROOT = "plain"
"""The module of `tests.warm` that most others import, too."""

_servers: dict[tuple[str, Path | None], subprocess.Popen[bytes] | ForkedServer] = {}
os.register_at_fork(after_in_child=_servers.clear)  # their streams are those of the parent


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish; the message holds its traceback."""


class Died(NamedTuple):
    """The answer of a rank that ended without one: its exit status, negative for a signal."""

    code: int


class _Job(NamedTuple):
    world: int
    folder: str
    port: int
    timeout: float
    call: bytes
    some_die: bool
    joined: bool


def run(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    warm: str = "plain",
    path: Path | None = None,
    some_die: bool = False,
    joined: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on ranks 0 to `world - 1` of a gloo group, and return the results by rank.

    `fn` is a module-level function.  It finds torch's default process group initialised and the random
    generators seeded alike; its result may be anything that pickle can store (tensors travel by value).  When
    a rank raises, dies, or is not done after `timeout` seconds, the others are killed at once.  `RankFailed`
    then has the reason and a traceback.  With `some_die`, ranks may be killed: their results are `Died`.
    Unless they are `joined`, they find the environment variables of torchrun in place of a process group.

    The ranks have imported `tests.warm.<warm>`, with `path` as the first folder of `sys.path`.
    """
    import torch.distributed as dist

    # The store lives here, so that no port is guessed and no rank can take it along when it ends.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    server = _server(warm, path)
    with tempfile.TemporaryDirectory(prefix="reknit-ranks-") as folder:
        job = _Job(world, folder, store.port, timeout, pickle.dumps((fn, args)), some_die, joined)
        try:
            _send(server.stdin, tuple(job))
            codes: dict[int, int] = _received(server.stdout)
        except BaseException:  # an interrupt, too, ends the ranks, which would go on without this process
            server.kill()
            raise
        try:
            # In the order in which they ended: the first is to blame for how the others did.
            answers = {rank: _answer(folder, rank, code, some_die) for rank, code in codes.items()}
        except RankFailed as error:
            raise RankFailed(f"{error}\n{_stacks(folder, world)}") from None
    return [answers[rank] for rank in range(world)]


def _server(warm: str, path: Path | None) -> subprocess.Popen[bytes] | ForkedServer:
    """Return the process that forks ranks with these imports."""
    server = _servers.get((warm, path))
    if server is None or server.poll() is not None:
        folder = os.environ.get(FOLDER)
        if folder is None:
            server = _started(warm, path)
        else:
            start = partial(_started if _is_root(warm, path) else _grown, warm, path)
            server, first = connected(folder, (warm, path), _variables(path), start)
            if first is not None:
                atexit.register(_end, first)
        _servers[warm, path] = server
        atexit.register(_end, server)
    return server


def _is_root(warm: str, path: Path | None) -> bool:
    """Return whether the process with such ranks is not to be forked from the one of plain ranks."""
    return warm in (_ROOT, "lean") or path is not None


def _grown(warm: str, path: Path | None, listener: int) -> subprocess.Popen[bytes] | ForkedServer:
    """Let the process that forks plain ranks fork one that imports more, or start one if it has ended."""
    _server(_ROOT, None)
    found = grown(os.environ[FOLDER], (_ROOT, None), _variables(path), warm, listener)
    return found or _started(warm, path, listener)


def _started(warm: str, path: Path | None, listener: int | None = None) -> subprocess.Popen[bytes]:
    """Start a process that imports, and then takes jobs from its stdin, or connections from a listener."""
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.ranks",
            warm,
            *([] if listener is None else [str(listener)]),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_variables(path),
        cwd=Path(__file__).parents[1],
        pass_fds=[] if listener is None else [listener],
    )


def _variables(path: Path | None) -> dict[str, str]:
    known = filter(None, [str(path) if path else "", os.environ.get("PYTHONPATH")])
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(known)}


def _end(server: subprocess.Popen[bytes] | ForkedServer) -> None:
    server.kill()
    server.communicate()


def _answer(folder: str, rank: int, code: int, some_die: bool) -> Any:
    try:
        ok, answer = pickle.loads(Path(folder, f"answer-{rank}").read_bytes())
    except FileNotFoundError:
        if some_die:
            return Died(code)
        text = f"rank {rank} ended with code {code}"
        if -code in _LEAVES_A_CORE:
            pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
            text += f"; if the system keeps cores, its core is where the pattern {pattern!r} says"
        raise RankFailed(text) from None
    if not ok:
        raise RankFailed(f"rank {rank} raised\n{answer}")
    return answer


def _stacks(folder: str, world: int) -> str:
    """Return the stacks of the ranks when they crashed, or when the first of them failed."""
    texts = {rank: Path(folder, f"stacks-{rank}").read_text() for rank in range(world)}
    return "\n".join(f"rank {rank} was here:\n{text}" for rank, text in texts.items() if text)


def _send(to: Any, message: object) -> None:
    data = pickle.dumps(message)
    to.write(struct.pack("<Q", len(data)) + data)
    to.flush()


def _received(source: BinaryIO | Any) -> Any:
    head = source.read(8)
    if len(head) < 8:
        raise EOFError("the process that forks ranks has ended")
    return pickle.loads(source.read(*struct.unpack("<Q", head)))


# In the process that forks ranks, and in the ranks.


def serve(warm: str, listener: int | None) -> None:
    """Fork ranks until the tests end."""
    if listener is not None:
        serve_all(listener, sys.stdin, warm, _import, _serve)
        return
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of ranks must not mix with the answers
    _import(warm)
    _serve(sys.stdin.buffer, answers)


def _import(warm: str) -> None:
    """Import the modules that ranks need."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end this process
    # Torch's own warnings have nothing to do with a test, and would hide the warnings of reknit.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    importlib.import_module(f"tests.warm.{warm}")
    _one_gloo_worker()
    gc.collect()
    gc.freeze()  # no rank goes through all that again


def _serve(source: BinaryIO, answers: BinaryIO) -> None:
    """Fork the ranks of each job."""
    while True:
        try:
            job = _Job(*_received(source))
        except EOFError:
            return
        _send(answers, _forked(job))


def _one_gloo_worker() -> None:
    """Let groups of gloo have one worker: two corrupt memory (`tests.torchrun.gloo_race` shows it)."""
    from torch.distributed import distributed_c10d as torch_dist

    gloo: Any = torch_dist.ProcessGroupGloo
    if gloo.__name__ == "OneWorker":
        return  # the process from which this one was forked has done it

    class OneWorker(gloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> None:
            options = gloo._Options()
            options._threads, options._timeout = 1, timeout
            options._devices = [gloo.create_device(interface="lo")]
            super().__init__(store, rank, size, options)

    vars(torch_dist)["ProcessGroupGloo"] = OneWorker


def _forked(job: _Job) -> dict[int, int]:
    """Return the exit status of each rank, in the order of their ends; a bad end kills the other ranks."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_be, args=(rank, job)) for rank in range(job.world)]
    for process in ranks:
        process.start()
    deadline = Deadline(job.timeout + _GRACE_S)
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    codes: dict[int, int] = {}
    while running:
        ended = wait(list(running), deadline.remaining())
        for sentinel in [sentinel for sentinel in running if sentinel in ended]:
            rank = running.pop(sentinel)
            ranks[rank].join()
            codes[rank] = ranks[rank].exitcode or 0
        if not ended or (any(codes.values()) and not job.some_die):
            break
    for rank in running.values():
        os.kill(ranks[rank].pid or 0, signal.SIGUSR1)  # it writes where it is
    written = Deadline(_GRACE_S)
    files = [Path(job.folder, f"stacks-{rank}") for rank in running.values()]
    while not written.passed() and not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.01)
    wait(list(running), 0.1)  # for the rest of their stacks
    for rank in running.values():
        ranks[rank].kill()
        ranks[rank].join()
        codes[rank] = ranks[rank].exitcode or 0
    return codes


def _be(rank: int, job: _Job) -> None:
    """Run the function of a job as one rank."""
    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    stacks = open(os.path.join(job.folder, f"stacks-{rank}"), "w")  # noqa: SIM115 - written to until the end
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.dump_traceback_later(job.timeout, exit=True, file=stacks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    ok = False
    try:
        if job.joined:
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
        else:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=str(job.world))
        torch.manual_seed(0)
        fn, args = pickle.loads(job.call)
        answer = pickle.dumps((True, fn(*args)))
        ok = True
    except BaseException:  # of any type: the test receives it
        answer = pickle.dumps((False, traceback.format_exc()))
    part = Path(job.folder, f"part-{rank}")
    part.write_bytes(answer)
    part.rename(Path(job.folder, f"answer-{rank}"))
    if not ok:
        sys.stderr.flush()
        # No clean-up: it would wait for peers that are about to be killed.
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    if job.joined and not job.some_die:
        # A peer may still be connecting to a group that the function made, and would find it closed.
        store.set(f"done-{rank}", "")
        ended = [f"done-{peer}" for peer in range(job.world)]
        store.wait(ended, timedelta(seconds=job.timeout + _GRACE_S))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    from tests import ranks

    ranks.serve(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None)
