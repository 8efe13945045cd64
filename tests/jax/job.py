"""JAX jobs for tests: real processes with several devices each, which serve many calls.

They are started and not forked, since JAX has threads, which the processes of other tests must not get.
So no module that pytest itself imports may import jax.
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from reknit.events.phase import Deadline
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


class Job:
    """`processes` with `devices` each; they start at once, and the first call waits for them."""

    def __init__(self, processes: int, devices: int) -> None:
        port = free_port()
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        self._logs = [tempfile.TemporaryFile() for _ in range(processes)]  # noqa: SIM115 - closed by `end`
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.jax.worker", str(rank), str(processes), str(port)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            for rank, log in enumerate(self._logs)
        ]

    def call(self, name: str, *arguments: Any, timeout_s: float = 200) -> list[Any]:
        """Call a function of `tests.jax`, by its dotted name, in all processes, and return all results."""
        self._send(range(len(self._processes)), name, arguments)
        return self._answers(range(len(self._processes)), timeout_s)

    def call_one(self, rank: int, name: str, *arguments: Any, timeout_s: float = 120) -> Any:
        """Call a function in one process, while the others do nothing."""
        self._send([rank], name, arguments)
        return self._answers([rank], timeout_s)[0]

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()
        for log in self._logs:
            log.close()

    def _send(self, ranks: Any, name: str, arguments: tuple[Any, ...]) -> None:
        line = json.dumps([f"tests.jax.{name}", [str(a) if isinstance(a, Path) else a for a in arguments]])
        for rank in ranks:
            stream = self._processes[rank].stdin
            assert stream is not None
            try:
                stream.write(line.encode() + b"\n")
                stream.flush()
            except BrokenPipeError:
                raise AssertionError(f"process {rank} has ended:\n{self._stacks()}") from None

    def _answers(self, ranks: Any, timeout_s: float) -> list[Any]:
        deadline, answers = Deadline(timeout_s), dict[int, Any]()
        for rank in ranks:
            stream = self._processes[rank].stdout
            assert stream is not None
            poll = select.poll()  # select.select takes no descriptor above 1023
            poll.register(stream, select.POLLIN)
            line = stream.readline() if poll.poll(1000 * deadline.remaining()) else b""
            if not line:
                reported = [answer["error"] for answer in answers.values() if "error" in answer]
                raise AssertionError("\n".join([f"process {rank} said nothing:", self._stacks(), *reported]))
            answers[rank] = json.loads(line)
        failed = {rank: found["error"] for rank, found in answers.items() if "error" in found}
        if failed:
            raise AssertionError("\n".join(f"process {rank}: {error}" for rank, error in failed.items()))
        return [answers[rank]["value"] for rank in ranks]

    def _stacks(self) -> str:
        """Return the stacks of all processes, after their output."""
        said = []
        for rank, (process, log) in enumerate(zip(self._processes, self._logs, strict=True)):
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            log.seek(0)
            said.append(f"process {rank}: {log.read()[-6000:].decode(errors='replace')}")
        return "\n".join(said)


def checks(module: str) -> list[str]:
    """Return the names of the check functions of a module of this folder."""
    source = (Path(__file__).parent / f"{module}.py").read_text()
    return [
        node.name.removeprefix("check_")
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]
