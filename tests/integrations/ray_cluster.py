"""A Ray cluster of this host, on loopback, that ends with this process: `run_all` trains and imports there.

python -m tests.integrations.ray_cluster FOLDER "ARGUMENTS OF THE EXAMPLE" "import ARGUMENTS OF REKNIT" ...

One cluster takes all runs and commands, as it takes seconds to start.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

from reknit.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trainers" / "ray_train.py"
PLANTED = "step_00000090"
"""The folder that looks like a newer step, but has no manifest."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    # Without a cluster of several hosts, all addresses are those of loopback.
    # Ray Train needs no processes that watch for preemptions, and nobody reads its figures.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Output(NamedTuple):
    """The last line of each run, and the errors of all."""

    lines: list[str]
    errors: str


def run_all(folder: Path, *runs: str) -> Output:
    """Run the example with each of these arguments, or a command of reknit that imports.

    The line of a run that fails begins with ``failed``, and that of a command has its exit code.  Beside the
    steps of the runs is an unfinished one, which looks newer.
    """
    search = filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, str(folder), *runs],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("step_", "failed", "exit code"))]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert len(lines) == len(runs), f"{done.stdout}\n{done.stderr[-4000:]}"
    return Output(lines, done.stderr)


@contextmanager
def cluster() -> Iterator[None]:
    """Have a cluster of three cores within the block."""
    import ray

    # Names of sockets are short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as scratch:
        ray.init(
            address="local",
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80_000_000,
            _temp_dir=scratch,
        )
        try:
            yield
        finally:
            ray.shutdown()


def _main(folder: Path, *runs: str) -> None:
    planted = folder / "steps" / PLANTED
    planted.mkdir(parents=True)
    (planted / "0123456789abcdef.0.0.bin").write_bytes(b"unfinished")
    with cluster():
        for run in runs:
            if run.startswith("import "):
                print("exit code", main(run.split()), flush=True)
            else:
                _run(folder, run.split())


def _run(folder: Path, arguments: list[str]) -> None:
    import ray.train

    with patch.object(sys, "argv", [str(EXAMPLE), str(folder), *arguments]):
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        except ray.train.TrainingFailedError as error:
            print(f"failed: {error!r}".partition("\n")[0], flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
