"""A benchmark on several ranks: its options, and the processes of a run."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RanksFailedError(SystemExit):
    """Ranks of a benchmark failed, or took too long.  Uncaught, it ends the process with the reason."""


def free_port() -> int:
    """Return an unused port of loopback, which the kernel gives to no other before rank 0 takes it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def launch(script: str, role: str, world: int, folder: str, timeout_s: float) -> dict[str, Any]:
    """Start one process per rank, and return the results of rank 0.  Raises `RanksFailedError`."""
    port = free_port()
    common = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    common.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", LOCAL_WORLD_SIZE=str(world))
    command = [sys.executable, script, *sys.argv[1:], "--role", role, "--dir", folder]
    log = Path(folder, f"{role}.log")  # some contenders print a lot
    with log.open("wb") as reported:
        ranks = [
            subprocess.Popen(
                command,
                env=dict(common, RANK=str(rank), LOCAL_RANK=str(rank)),
                stdout=sys.stderr,
                stderr=reported,
            )
            for rank in range(world)
        ]
    end = time.monotonic() + timeout_s
    try:
        # A rank that fails leaves the others waiting for it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
        status = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(ended != 0 for ended in status):
        sys.stderr.write(log.read_text(errors="replace")[-20_000:])
        raise RanksFailedError(f"the ranks of the {role} part ended with {status} (None: not by then)")
    result: dict[str, Any] = json.loads(Path(folder, f"{role}.json").read_text())
    return result


def options(
    about: str | None, *, timeout_s: float = 900.0, out: str = "file for the JSON, besides stdout"
) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that runs on several ranks."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, help="seconds for the processes of a part"
    )
    parser.add_argument("--role", help=argparse.SUPPRESS)
    return parser


@contextmanager
def scratch(above: str) -> Iterator[str]:
    """Make a folder for the files of a run, and remove it also when the run is terminated."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="reknit-bench-", dir=above)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def rank_main(args: argparse.Namespace, measure: Callable[[], Any]) -> NoReturn:
    """Measure as one rank, write the result of rank 0 to a file, and end this process."""
    import warnings

    import torch.distributed as dist

    import reknit

    last = threading.Timer(args.timeout + 30, lambda: os._exit(3))  # in case no process ends this rank
    last.daemon = True
    last.start()
    warnings.simplefilter("ignore")  # torch warns at every load
    try:
        result = measure()
        reknit.close()
        if int(os.environ["RANK"]) == 0:
            Path(args.dir, f"{args.role}.json").write_text(json.dumps(result))
        dist.barrier()
    except BaseException:  # printed, and shown by the exit status
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for the threads of libraries that keep some
