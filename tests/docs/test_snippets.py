"""Every snippet and every command of the documentation works, page by page, as a reader would go."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from reknit.cli.main import parser
from tests.docs.pages import ROOT, Block, blocks, commands
from tests.ranks import run

NAMES = sorted(
    ["README.md", "docs/index.md", "docs/tutorial.md", "docs/troubleshooting.md"]
    + [page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/howto/*.md")]
)
# On these pages the commands stand for themselves: they name checkpoints of a job that nobody ran.
ILLUSTRATED = {"docs/howto/command-line.md", "docs/howto/export-to-hugging-face.md"}

# The README's commands are the scripts of this repository: they set up, and run these very tests.
NOT_FOLLOWED = "scripts/"


# Elsewhere its processes are forked, which takes a tenth of the time.
TORCHRUN, WITH_TORCHRUN_ITSELF = "torchrun --nproc-per-node ", "docs/tutorial.md"


@pytest.mark.parametrize("page", NAMES)
def test_a_reader_can_follow_the_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            # Empty lines in front give tracebacks the line of the page.
            exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), names)
        elif block.language == "console" and page not in ILLUSTRATED:
            follow(block, page)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_goes_on_when_it_is_run_again(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = [block.text for block in blocks((ROOT / page).read_text()) if block.language == "python"]
    for _ in range(2):
        exec(compile(example, ROOT / page, "exec"), {"__name__": "__main__"})
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["step_00000100", "step_00000200"]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_first_pages_say_how_to_install(page: str) -> None:
    shell = [block.text for block in blocks((ROOT / page).read_text()) if block.language == "bash"]
    (command,) = [text.strip() for text in shell if text.startswith("pip install")]
    extras = re.search(r"\[(.*)\]", command)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(metadata("reknit").get_all("Provides-Extra", []))


@pytest.mark.parametrize("page", sorted(ILLUSTRATED))
def test_commands_that_are_only_shown_are_spelled_right(page: str) -> None:
    shown = [command for block in blocks((ROOT / page).read_text()) for command in commands(block)]
    assert shown
    for command in shown:
        program, *arguments = shlex.split(command)
        assert program == "reknit"
        parser().parse_args(arguments)


def run_script(folder: str, script: str, *arguments: str) -> None:
    """Run a script in this process, which is one of a job."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def follow(block: Block, page: str) -> None:
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    for command in commands(block):
        if command.startswith(NOT_FOLLOWED):
            continue
        if command.startswith(TORCHRUN) and page != WITH_TORCHRUN_ITSELF:
            world, *script = shlex.split(command.removeprefix(TORCHRUN))
            run(int(world), run_script, os.getcwd(), *script, joined=False)
            continue
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{page}:{block.line}: {command}\n{done.stdout}\n{done.stderr}"


def test_blocks_are_found_with_their_lines_and_files() -> None:
    plain = "# A\n\n```python\nx = 1\n```\n\n"
    captioned = "````{code-block} python\n:caption: a.py\n\ny = '''\n```\n'''\n````\n"
    assert blocks(plain + captioned) == [
        Block("python", "x = 1\n", 4),
        Block("python", "y = '''\n```\n'''\n", 10, "a.py"),
    ]


def test_only_lines_with_a_dollar_are_commands() -> None:
    assert commands(Block("console", "$ reknit ls\nstep 1\n$ true\n", 1)) == ["reknit ls", "true"]
