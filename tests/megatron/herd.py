"""Real ranks with Megatron: `run(world, fn, *args)` forks them from a process that has imported it once.

Importing Megatron takes seconds, and what makes it run without a GPU changes torch for good: both happen in
one process of its own, which has no threads when it forks.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_herds: dict[Path | None, subprocess.Popen[bytes]] = {}


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish; the message holds its traceback."""


def run(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 180.0, other: Path | None = None
) -> list[Any]:
    """Call `fn(*args)` on every rank of a real gloo group; return what each returned, by rank.

    `fn` is a module-level function.  Megatron is imported and adapted to the CPU, and not initialised; it is
    that of the environment, or of the folder `other` where a wheel of another version was installed.
    """
    herd = _started(other)
    assert herd.stdin is not None
    assert herd.stdout is not None
    with tempfile.TemporaryDirectory(prefix="reknit-herd-") as folder:
        _send(herd.stdin, pickle.dumps((world, folder, timeout, pickle.dumps((fn, args)))))
        codes = pickle.loads(_received(herd.stdout))
        return [_answer(folder, rank, code) for rank, code in sorted(codes.items(), key=_blame)]


def _blame(ended: tuple[int, int]) -> tuple[bool, int]:
    """Order ranks by number; of those that ended badly, the ones with a story of their own come first."""
    return ended[1] != 1, ended[0]


def _started(other: Path | None) -> subprocess.Popen[bytes]:
    if other not in _herds or _herds[other].poll() is not None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONHASHSEED="0")
        environment.pop("LOCAL_WORLD_SIZE", None)
        if other is not None:
            known = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([str(other), *([known] if known else [])])
        herd = _herds[other] = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.megatron.herd"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        atexit.register(herd.kill)
    return _herds[other]


def _answer(folder: str, rank: int, code: int) -> Any:
    path = os.path.join(folder, f"answer-{rank}")
    if not os.path.exists(path):
        with open(os.path.join(folder, f"stacks-{rank}")) as stacks:
            raise RankFailed(f"rank {rank} ended with {code}\n{stacks.read()}")
    with open(path, "rb") as file:
        ok, answer = pickle.load(file)
    if not ok:
        raise RankFailed(f"rank {rank} raised\n{answer}")
    return answer


def _send(to: BinaryIO | Any, message: bytes) -> None:
    to.write(struct.pack("<Q", len(message)) + message)
    to.flush()


def _received(source: BinaryIO | Any) -> bytes:
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    data: bytes = source.read(*struct.unpack("<Q", head))
    return data


def _serve() -> None:
    """Fork ranks as long as someone asks for them."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print is no answer
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    from tests.megatron import shim

    shim.install()
    # So that no rank has to.
    import tests.megatron.gpt
    import tests.megatron.jobs
    import tests.megatron.truth  # noqa: F401

    while True:
        try:
            world, folder, timeout, call = pickle.loads(_received(sys.stdin.buffer))
        except EOFError:
            return
        _send(answers, pickle.dumps(_forked(world, folder, timeout, call)))


def _forked(world: int, folder: str, timeout: float, call: bytes) -> dict[int, int]:
    """Return how each rank ended; the first that ends badly takes the others with it."""
    ranks = {}
    for rank in range(world):
        if (process := os.fork()) == 0:
            _be(rank, world, folder, timeout, call)
        ranks[process] = rank
    ended: dict[int, int] = {}
    while len(ended) < world:
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if process not in ranks:
            continue
        ended[ranks[process]] = code
        if code:
            for other, rank in ranks.items():
                if rank not in ended:
                    os.kill(other, signal.SIGKILL)
    return ended


def _be(rank: int, world: int, folder: str, timeout: float, call: bytes) -> None:
    """Be one rank, and end."""
    import torch
    import torch.distributed as dist

    os.setpgid(0, 0)
    stacks = open(os.path.join(folder, f"stacks-{rank}"), "w")  # noqa: SIM115 - written to until the end
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    code = 1
    try:
        store = dist.FileStore(  # type: ignore[attr-defined]
            os.path.join(folder, "store"), world
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        torch.manual_seed(0)
        fn, args = pickle.loads(call)
        answer, code = (True, fn(*args)), 0
    except BaseException:  # whatever it is, the test must hear of it
        answer = (False, traceback.format_exc())
    with open(os.path.join(folder, f"answer-{rank}.part"), "wb") as file:
        pickle.dump(answer, file)
    os.rename(file.name, os.path.join(folder, f"answer-{rank}"))
    if code == 0:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(code)  # what the process that forked this one would do at its end is not this one's to do


if __name__ == "__main__":
    _serve()
