"""The README as a stranger follows it, and the mistakes of the first hour, typed literally into a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import reknit
from tests.docs.pages import ROOT, blocks, commands
from tests.docs.test_snippets import ranks_printed, run_script
from tests.ranks import RankFailed, run


def typed(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a shell, and return its exit code and its output on both streams."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": search, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_loop_of_the_readme_goes_on_from_one_process_to_two_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = blocks((ROOT / "README.md").read_text())
    (script,) = [block for block in page if block.file == "train.py"]
    (tmp_path / "train.py").write_text(script.text)
    shown = [command for block in page if block.language == "console" for command in commands(block)]
    lines = [command for command in shown if "train.py" in command]
    assert lines == ["python train.py", "torchrun --nproc-per-node 2 train.py", "python train.py"]
    monkeypatch.chdir(tmp_path)
    for number, line in enumerate(lines):  # test_fsdp2_page.py has a real start of torchrun
        output = ranks_printed(line)
        said = f"trained from step {100 * number} to step {100 * number + 100}"
        assert output.count(said) == (2 if line.startswith("torchrun") else 1), output
    assert len(list((tmp_path / "checkpoints").iterdir())) == 6


def test_the_other_commands_of_the_readme_are_scripts_of_the_repository() -> None:
    page = blocks((ROOT / "README.md").read_text())
    shown = [command for block in page if block.language == "console" for command in commands(block)]
    scripts = [command for command in shown if "train.py" not in command]
    assert scripts == ["scripts/demo", "scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


# The mistakes of a stranger in a script, and the answers: the cause, the place and the remedy.
STATE = "import torch, reknit; model = torch.nn.Linear(4, 4); state = {'model': model}; "
INIT = "import torch.distributed as dist; dist.init_process_group('gloo'); "


def test_a_mistake_under_torchrun_is_answered(tmp_path: Path) -> None:
    # In forked ranks, which have the variables of torchrun: a start of it takes as long as ten of these.
    for script, said in [
        (
            "reknit.save('ckpt', state, overwrite=True)",
            ("2 processes (WORLD_SIZE=2)", "not connected", "init_process_group()", "reknit.alone()"),
        ),
        (
            INIT + "dist.get_rank() == 0 and reknit.save('ckpt', state, options=reknit.SaveOptions("
            "timeout_s=7, comm=reknit.CommOptions(connect_timeout_s=7)))\n"
            "dist.get_rank() == 1 and __import__('time').sleep(60)",  # torchrun ends it
            ("rank 0 has waited 5 s for rank 1", "not rank 0 alone as with torch.save", "did not come"),
        ),
    ]:
        (tmp_path / "train.py").write_text(STATE + script)
        (shown := tmp_path / "shown").write_text("")
        with pytest.raises(RankFailed) as failed:
            run(2, run_script, str(tmp_path), str(shown), "train.py", joined=False)
        output = f"{shown.read_text()}{failed.value}"
        assert [part for part in said if part not in output] == [], output
        assert not (tmp_path / "ckpt").exists()


def test_a_mistake_in_the_terminal_is_answered(tmp_path: Path) -> None:
    """`tests/cli/test_command_line.py` has the words that are misspelt."""
    reknit.save(tmp_path / "ckpt", {"model": {"w": np.ones(4)}})
    for command, code, said in [
        ("reknit show chpt", 3, ("chpt", "ckpt")),
        ("reknit verify ckpt", 0, ("not read", "reknit verify ckpt --data")),
    ]:
        found, output = typed(command, tmp_path)
        assert [part for part in said if part not in output] == [], output
        assert found == code, output
