"""The ends of a program while its saves are under way: scripts of users, as they are run.

Where a moment matters, the store of the script waits in a chosen operation for a file, the gate.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from tests.faults.nursery import agents_of, is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUN_S = 20.0
"""The longest time that a script may take to end; one that takes longer hangs."""

# No `if __name__ == "__main__"`: a script does not need it.
HEAD = """
import os, sys, time, threading
import numpy as np
import reknit
from reknit.testing.faulty_storage import Fault
from tests.storage.killpoint import faulty_url, register_faulty

register_faulty()
root = sys.argv[1]
options = reknit.SaveOptions(durability="process", timeout_s=50, exit_wait_s=45)
model = {"weight": np.full(1 << 20, 1, np.int32)}

def say(word):
    print(word, flush=True)

def save(step, *faults, **more):
    model["weight"][:] = step
    path = f"{root}/{step}"
    url = faulty_url(path, *faults, gate=root + "/gate") if faults else path
    pending = reknit.save(url, {"model": model}, step=step, wait=False, **{"options": options, **more})
    model["weight"][:] = -1  # what is staged may be changed
    return pending

gated = Fault("stall", 1, "finish")
# The save waits, when all is written, until there is a gate.

def gate(after=0.0):
    threading.Timer(after, lambda: open(root + "/gate", "w").close()).start()
"""


class Script:
    """A running script."""

    def __init__(self, folder: Path, body: str) -> None:
        self.root = folder / "checkpoints"
        self.root.mkdir()
        file = folder / "train.py"
        file.write_text(HEAD + body)
        command = [sys.executable, "-W", "ignore", str(file), str(self.root)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # The script imports the faulty store from the tests.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        # Its process group is its own, as if a shell had started it.
        self.process = subprocess.Popen(command, text=True, start_new_session=True, env=env, **pipes)  # type: ignore[call-overload]

    def says(self, word: str) -> None:
        """Wait for a line."""
        line = self.process.stdout.readline()
        assert line == word + "\n", line + self.process.communicate(timeout=RUN_S)[1]

    def ends(self) -> tuple[int, str]:
        """Wait for the end of the script and its agents, and return exit status and errors."""
        # The agent has the same standard error stream: reading it to the end would wait for the agent.
        code = self.process.wait(RUN_S)
        self.agents_end()
        return code, self.process.communicate(timeout=RUN_S)[1]

    def agents(self) -> list[int]:
        return agents_of(self.process.pid)

    def agents_end(self) -> None:
        wait_until(lambda: not self.agents(), RUN_S, lambda: "the agent goes on")

    def open_gate(self) -> None:
        (self.root / "gate").touch()

    def holds(self, step: int) -> bool:
        """Return whether a step is committed, and whole."""
        path = self.root / str(step)
        try:
            report = reknit.verify(path, "data")
        except reknit.CheckpointNotFoundError:
            return False
        assert report.ok, report.problems
        target = {"model": {"weight": np.zeros(1 << 20, np.int32)}}
        reknit.load(path, target)
        return bool((target["model"]["weight"] == step).all())

    def files(self, step: int) -> list[str]:
        return [name for _, _, names in os.walk(self.root / str(step)) for name in names]


class _Scripts:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Script] = []

    def __call__(self, body: str) -> Script:
        self.started.append(Script(self._folder, body))
        return self.started[-1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[_Scripts]:
    """Return a function that starts scripts; no script outlives its test."""
    scripts = _Scripts(tmp_path)
    yield scripts
    for script in scripts.started:
        for pid in script.agents():
            os.kill(pid, signal.SIGKILL)
        script.process.kill()
        script.process.communicate()


def test_the_end_of_a_script_without_a_guard_waits_for_its_save(run: _Scripts) -> None:
    script = run("save(1, gated); gate(0.3); say('end')")
    script.says("end")
    assert script.ends() == (0, "")
    assert script.holds(1)


def test_an_exception_in_training_is_told_and_what_was_staged_is_committed(run: _Scripts) -> None:
    script = run("save(1, gated); gate(0.3); raise ZeroDivisionError('training diverged')")
    code, errors = script.ends()
    assert code == 1
    assert errors.strip().endswith("ZeroDivisionError: training diverged")
    assert script.holds(1)


def test_a_script_does_not_wait_longer_than_it_was_told_and_its_agent_commits_later(run: _Scripts) -> None:
    script = run("import dataclasses\nsave(1, gated, options=dataclasses.replace(options, exit_wait_s=0.2))")
    assert script.process.wait(RUN_S) == 0
    assert script.agents()
    assert not script.holds(1)
    script.open_gate()
    code, errors = script.ends()
    assert code == 0
    assert "its agent goes on" in errors
    assert script.holds(1)


def test_a_process_that_ends_at_once_after_staging_leaves_a_checkpoint(run: _Scripts) -> None:
    # One save is being written, and one waits for its turn.
    to_file = "import dataclasses; options = dataclasses.replace(options, events=root + '/events.jsonl')"
    script = run(f"{to_file}\nsave(1, gated); save(2); os._exit(7)")
    assert script.process.wait(RUN_S) == 7
    assert "its agent finishes 2 saves" in script.process.stderr.readline()
    assert not script.holds(1)
    assert not script.holds(2)
    script.open_gate()
    assert script.ends()[0] == 7
    assert script.holds(1)
    assert script.holds(2)
    events = [json.loads(line) for line in (script.root / "events.jsonl").read_text().splitlines()]
    commits = [e["step"] for e in events if e.get("phase") == "commit" and e["process"] == "agent"]
    assert commits == [1, 2], "the agent goes on to record its commits"


def test_an_interrupt_after_staging_ends_the_script_and_the_save_is_committed(run: _Scripts) -> None:
    script = run("save(1, gated); say('staged'); time.sleep(100)")
    script.says("staged")
    os.killpg(script.process.pid, signal.SIGINT)
    script.open_gate()
    code, errors = script.ends()
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert script.holds(1)


# A slow copy, which prints a line when it begins.
SLOW_STAGING = """
import reknit.engine.background.snapshot as snapshot
from reknit.engine.memory.images import Image

def fill(self, start, out, copy=None, fill=Image.fill):
    say("staging")
    while True:
        time.sleep(0.05)

Image.fill = fill
"""

ENDING_STAGING = SLOW_STAGING.replace("while True:", "while not os.path.exists(root + '/on'):")
"""The same, which goes on when there is a file `on`."""


def test_a_kill_during_staging_leaves_nothing(run: _Scripts) -> None:
    script = run("save(1).result(50)\n" + SLOW_STAGING + "save(2)")
    script.says("staging")
    script.process.kill()
    code, errors = script.ends()
    assert code == -signal.SIGKILL
    # The first is committed, and may still be counted while the agent clears up behind it.
    assert re.search(r"its agent finishes [12] saves", errors)
    assert not script.holds(2)
    assert script.files(2) == []


def test_a_script_may_go_on_after_an_interrupt_during_staging(run: _Scripts) -> None:
    script = run(
        "real = __import__('reknit.engine.memory.images').engine.memory.images.Image.fill\n"
        + ENDING_STAGING
        + "try:\n    save(2)\nexcept KeyboardInterrupt:\n    say('interrupted')\n"
        "Image.fill = real\nsave(3).result(50)"
    )
    script.says("staging")
    os.kill(script.process.pid, signal.SIGINT)
    (script.root / "on").touch()
    while (line := script.process.stdout.readline()) == "staging\n":
        pass
    assert line == "interrupted\n"
    assert script.ends()[0] == 0
    assert script.holds(3)
    assert not script.holds(2)
    assert script.files(2) == []


def test_close_waits_for_a_save_or_leaves_it_to_the_agent_and_the_next_one_starts_a_new_agent(
    run: _Scripts,
) -> None:
    script = run(
        "pending = save(1, gated); say(reknit.close(0.1)); gate(); pending.result(50)\n"
        "save(2); say(reknit.close()); save(3).result(); say(reknit.close()); say('end')"
    )
    for word in ("False", "True", "True", "end"):
        script.says(word)
    assert script.ends() == (0, "")
    assert all(script.holds(step) for step in (1, 2, 3))


def test_two_saves_to_one_path_that_overlap_give_the_first_and_an_error(run: _Scripts) -> None:
    script = run(
        "first = save(1, gated); model['weight'][:] = 9\n"
        "second = reknit.save(f'{root}/1', {'model': model}, step=1, wait=False, options=options)\n"
        "gate(); first.result(50)\n"
        "try:\n    second.result(50)\nexcept reknit.CheckpointExistsError:\n    say('exists')"
    )
    script.says("exists")
    assert script.ends()[0] == 0
    assert script.holds(1)
    assert len(script.files(1)) == 3


def test_a_load_beside_a_save_gets_what_was_committed_before(run: _Scripts) -> None:
    script = run(
        "save(1).result(50); pending = save(2, gated)\n"
        "assert reknit.latest(root) == root + '/1'\n"
        "reknit.load(reknit.latest(root), {'model': model}); say(model['weight'].min())\n"
        "gate(); pending.result(50)\n"
        "reknit.load(reknit.latest(root), {'model': model}); say(model['weight'].min())"
    )
    script.says("1")
    script.says("2")
    code, warnings = script.ends()
    assert code == 0
    # The second save may or may not have its marker when the newest step is looked for.
    assert all("are under way" in line for line in warnings.splitlines())


def test_an_error_that_nobody_asked_for_is_logged_and_raised_by_the_next_save(run: _Scripts) -> None:
    script = run(
        "pending = save(1, Fault('full', 1, 'write')); pending.wait(50)\n"
        "try:\n    save(2)\nexcept reknit.errors.StorageFullError as error:\n    say('raised')"
    )
    script.says("raised")
    code, errors = script.ends()
    assert code == 0
    assert "save to" in errors
    assert "no space left" in errors
    assert not script.holds(1)
    assert script.files(1) == []
    assert script.holds(2)


# Signal handlers.

HANDLER = (
    "import itertools, signal\n"
    "numbers = itertools.count(100)\n"
    "def handle(*_):\n"
    "    load = lambda: reknit.load(f'{root}/1', {})\n"
    "    for call in (lambda: save(next(numbers)), lambda: pending.result(), load):\n"
    "        try:\n            call()\n"
    "        except reknit.UsageError as error:\n            refused.append(error)\n"
    "        except NameError:\n            pass\n"
    "refused = []\n"
    "signal.signal(signal.SIGTERM, handle)\n"
)


def test_a_save_in_a_signal_handler_is_refused_at_once_where_it_interrupts_another(run: _Scripts) -> None:
    script = run(
        f"{HANDLER}pending = save(1, gated)\n"
        "me = os.getpid()\n"
        "def kill():\n"
        "    while not os.path.isdir(f'{root}/2') or not os.listdir(f'{root}/2'):\n        time.sleep(0.01)\n"
        "    os.kill(me, signal.SIGTERM)\n"
        "    while len(refused) < 3:\n        time.sleep(0.01)\n"
        "    gate()\n"
        "threading.Thread(target=kill).start()\n"
        "url = faulty_url(f'{root}/2', gated, gate=root + '/gate')\n"
        "reknit.save(url, {'model': model}, step=2)\n"
        "say(len(refused)); say(all('inside reknit.save' in str(e) for e in refused))\n"
        "say('on_preemption' in refused[0].remedy)\n"
        "pending.result(50); save(3).result(50)"
    )
    script.says("3")
    script.says("True")
    script.says("True")
    assert script.ends() == (0, "")
    assert all((script.root / str(step) / "manifest.json").exists() for step in (1, 2, 3))


def test_a_save_in_a_handler_that_interrupts_code_of_an_object_is_refused_or_works(run: _Scripts) -> None:
    script = run(
        f"{HANDLER}"
        "class Own:\n"
        "    def state_dict(self):\n        os.kill(os.getpid(), signal.SIGTERM); return {}\n"
        "    def load_state_dict(self, state):\n        pass\n"
        "pending = save(1); pending.result(50)\n"
        "for wait in (False, True):\n"
        "    saved = reknit.save(f'{root}/{wait}', {'own': Own()}, wait=wait)\n"
        "    say(type(saved.result(50)).__name__)\n"
        "say(['begun inside another one' in str(e) for e in refused])"
    )
    script.says("SaveReport")
    script.says("SaveReport")
    said = script.process.stdout.readline().strip()
    assert "True" in said
    assert script.ends()[0] == 0
    assert (script.root / "101" / "manifest.json").exists()


def test_saves_go_on_whenever_signals_with_saving_handlers_come(run: _Scripts) -> None:
    script = run(
        f"{HANDLER}pending = save(1)\n"
        "over, me = threading.Event(), os.getpid()\n"
        "def storm():\n"
        "    while not over.wait(0.02):\n        os.kill(me, signal.SIGTERM)\n"
        "threading.Thread(target=storm).start()\n"
        "for step in range(2, 30):\n"
        "    state = {'model': {'weight': np.full(1 << 16, step)}}\n"
        "    reknit.save(f'{root}/{step}', state, wait=False, options=options).result(50)\n"
        "over.set(); signal.signal(signal.SIGTERM, signal.SIG_IGN); say(len(refused) > 0)"
    )
    script.says("True")
    assert script.ends()[0] == 0
    assert all((script.root / str(step) / "manifest.json").exists() for step in range(2, 30))


def test_a_signal_handler_may_close_while_the_end_of_the_process_waits(run: _Scripts) -> None:
    script = run(
        "import logging, signal; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "def handle(*_):\n    open(root + '/gate', 'w').close(); signal.alarm(20); say(reknit.close())\n"
        "signal.signal(signal.SIGTERM, handle)\n"
        "shows = lambda record: 'waits for' not in record.getMessage() or (say('waits'), True)[1]\n"
        "logging.getLogger('reknit').addFilter(shows)\n"
        "save(1, gated)"
    )
    script.says("waits")
    time.sleep(0.5)  # the line comes just before the wait
    os.kill(script.process.pid, signal.SIGTERM)
    script.says("True")
    assert script.ends()[0] == 0
    assert script.holds(1)


# Forked children.


def test_a_forked_child_waits_for_nothing_of_its_parent_and_saves_with_an_agent_of_its_own(
    run: _Scripts,
) -> None:
    script = run(
        "pending = save(1, gated)\n"
        "if os.fork() == 0:\n    sys.exit(0)\n"
        "say(os.wait()[1]); gate(); pending.result(50)\n"
        "if os.fork() == 0:\n    save(2).result(50); reknit.close(); sys.exit(0)\n"
        "say(os.wait()[1]); save(3).result(50)"
    )
    script.says("0")
    script.says("0")
    assert script.ends() == (0, "")
    assert all(script.holds(step) for step in (1, 2, 3))


def test_a_child_of_multiprocessing_waits_for_its_own_saves_and_not_for_those_of_its_parent(
    run: _Scripts,
) -> None:
    script = run(
        "import logging, multiprocessing; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "first = save(1, gated)\n"
        "def work():\n"
        "    try:\n        first.result(50)\n"
        "    except reknit.ReknitError as error:\n        say(type(error).__name__)\n"
        "    save(2, Fault('stall', 1, 'commit'))\n"
        "    opens = lambda record: 'waits for' not in record.getMessage() or (gate(), True)[1]\n"
        "    logging.getLogger('reknit').addFilter(opens)\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join(); say(child.exitcode)\n"
        "first.result(50)\n"
        "import pathlib; say(pathlib.Path(root, '2', 'manifest.json').exists())"
    )
    script.says("AgentError")
    script.says("0")
    script.says("True")
    code, said = script.ends()
    assert code == 0
    assert said.count("this process waits for 1 saves under way") == 1
    assert script.holds(1)
    assert script.holds(2)


def test_a_forked_child_that_lives_on_does_not_keep_the_agent(run: _Scripts) -> None:
    script = run(
        "save(1).result(50); child = os.fork()\n"
        "if child == 0:\n    time.sleep(100); os._exit(0)\n"
        "say(child); os.kill(os.getpid(), 9)"
    )
    child = int(script.process.stdout.readline())
    try:
        assert script.process.wait(RUN_S) == -signal.SIGKILL
        script.agents_end()
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_agent_sees_that_its_trainer_died_although_another_process_holds_its_socket(
    run: _Scripts,
) -> None:
    script = run(
        "import subprocess\nsave(1).result(50); save(2, gated)\n"
        "for number in range(3, 50):\n"
        "    try:\n        os.set_inheritable(number, True)\n    except OSError:\n        pass\n"
        "quiet = subprocess.DEVNULL\n"
        "child = subprocess.Popen(['sleep', '100'], close_fds=False, stdout=quiet, stderr=quiet)\n"
        "say(child.pid); os.kill(os.getpid(), 9)"
    )
    child = int(script.process.stdout.readline())
    try:
        assert script.process.wait(RUN_S) == -signal.SIGKILL
        script.open_gate()
        script.agents_end()
        assert is_running(child)
        assert script.holds(2)
    finally:
        os.kill(child, signal.SIGKILL)


def test_sys_exit_waits_for_the_save_and_keeps_its_status(run: _Scripts) -> None:
    script = run("save(1, gated); gate(0.3); sys.exit(3)")
    assert script.ends() == (3, "")
    assert script.holds(1)
