"""Real processes for tests: `run(world, fn, *args)` calls a function on every rank of a real gloo group.

Processes are forked from a server that has imported torch already, so a test with two ranks takes well under
a second.  The first `run` of a session starts the server, which takes a few.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "pytest",
    "hypothesis",
    "reknit.frameworks.optimizer",
    "tests.torchrun.models",
]
_GRACE_S = 10.0


class RankFailed(AssertionError):
    """A rank raised, died, or did not finish; the message holds its traceback."""


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    answers: Connection


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `fn(*args)` on ranks 0 to `world - 1` of a gloo group, and return what each returned, by rank.

    `fn` is a module-level function.  It finds torch's default process group initialised and the random
    generators seeded alike; it may return anything that pickle knows (tensors travel by value).  When a rank
    raises, dies, or is not done after `timeout` seconds, the others are killed at once and `RankFailed` tells
    why, with a traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The store lives in the parent, so that no port is guessed and no rank can take it along when it ends.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="reknit-ranks-") as folder:
        ranks = []
        try:
            for number in range(world):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_main, args=(number, world, store.port, call, theirs, folder, timeout), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(number, process, ours))
            return _gathered(ranks, Deadline(timeout + _GRACE_S), folder)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.answers.close()


def _gathered(ranks: Sequence[_Rank], deadline: Deadline, folder: str) -> list[Any]:
    """Return the answers of all ranks, or raise at the first that has none to give."""
    results: dict[int, Any] = {}
    waiting = {rank.answers: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), deadline.remaining())
        if not ready:
            stuck = sorted(rank.number for rank in waiting.values())
            raise RankFailed(f"ranks {stuck} did not finish in time\n{_stacks(folder, stuck)}")
        for answers in ready:
            rank = waiting.pop(answers)  # type: ignore[call-overload]
            try:
                ok, answer = pickle.loads(rank.answers.recv_bytes())
            except EOFError:
                rank.process.join(_GRACE_S)
                code = rank.process.exitcode
                raise RankFailed(
                    f"rank {rank.number} ended with code {code}\n{_stacks(folder, [rank.number])}"
                ) from None
            if not ok:
                raise RankFailed(f"rank {rank.number} raised\n{answer}")
            results[rank.number] = answer
    for rank in ranks:
        rank.process.join(_GRACE_S)
    return [results[rank.number] for rank in ranks]


def _stacks(folder: str, numbers: Sequence[int]) -> str:
    """Return what the fault handlers of some ranks wrote."""
    texts = []
    for number in numbers:
        with open(_stack_file(folder, number)) as file:
            texts.append(f"rank {number}:\n{file.read()}")
    return "\n".join(texts)


def _stack_file(folder: str | Path, number: int) -> str:
    return os.path.join(folder, f"stacks-{number}.txt")


def _main(
    rank: int, world: int, port: int, call: bytes, answers: Connection, folder: str, timeout: float
) -> None:
    """Be one rank."""
    stacks = open(_stack_file(folder, rank), "w")  # noqa: SIM115 - the fault handler writes into it until the end
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    # What torch itself warns of here says nothing about a test, and would drown what does.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        torch.manual_seed(0)
        fn, args = pickle.loads(call)
        answer = pickle.dumps((True, fn(*args)))
    except BaseException:  # whatever it is, the parent must hear of it
        answers.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.stderr.flush()
        # No clean-up: it would wait for peers that are about to be killed.
        os._exit(1)
    answers.send_bytes(answer)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
