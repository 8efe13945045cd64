"""The processes of a JAX job on the CPU, which save and load with reknit and Orbax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ranks import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.orbax.contestants import Mode

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def run(
    folder: str,
    modes: Sequence[Mode],
    *,
    mib: int,
    arrays: int,
    mesh: Sequence[int],
    meshes: Mapping[str, Sequence[int]],
    rounds: int,
    processes: int = 1,
) -> dict[str, Any]:
    """Return, by contestant and quantity, the figures of each round: the sum or the most of all processes.

    The sizes of a mesh are those of the axes data, fsdp and tensor; its devices are spread over processes.
    """
    folder = os.path.abspath(folder)  # Orbax takes no other paths
    os.makedirs(folder, exist_ok=True)
    devices = max(mesh[0] * mesh[1] * mesh[2], *(a * b * c for a, b, c in meshes.values())) // processes
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    port = free_port()
    spec = {
        "processes": processes,
        "port": port,
        "folder": folder,
        "mib": mib,
        "arrays": arrays,
        "mesh": list(mesh),
        "meshes": {name: list(sizes) for name, sizes in meshes.items()},
        "rounds": rounds,
        "modes": [mode._asdict() for mode in modes],
    }
    with tempfile.TemporaryFile() as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.orbax.worker", json.dumps(spec | {"rank": rank})],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for rank in range(processes)
        ]
        try:
            answers = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        if any(process.returncode for process in started):
            log.seek(0)
            reported = log.read()[-4000:].decode(errors="replace")
            raise RuntimeError(f"the JAX job of {processes} processes failed:\n{reported}")
    return together([json.loads(answer.splitlines()[-1]) for answer in answers])


def together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the job from those of its processes."""
    found: dict[str, Any] = {}
    for name in answers[0]:
        each = [answer[name] for answer in answers]
        failed = [one["failed"] for one in each if "failed" in one]
        if failed:
            found[name] = {"failed": failed[0]}
            continue
        found[name] = {
            what: [(sum if what.startswith("sum_") else max)(of) for of in zip(*rounds, strict=True)]
            for what in each[0]
            if (rounds := [one[what] for one in each])
        }
    return found
