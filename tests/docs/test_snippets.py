"""Every snippet and every command of the documentation works, page by page, as a reader would go."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from importlib.metadata import metadata
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from reknit.cli.main import main, parser
from tests.docs.outputs import (
    HERE,
    Printed,
    after_commands,
    captured,
    normalised,
    shown_in,
    with_real_outputs,
)
from tests.docs.pages import ROOT, Block, blocks, commands
from tests.ranks import Died, run
from tests.running.examples import is_night

if TYPE_CHECKING:
    import io
    from collections.abc import Callable

NAMES = sorted(
    ["docs/index.md", "docs/tutorial.md", "docs/troubleshooting.md", "docs/reference/api.md"]
    + [page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/howto/*.md")]
)
# The commands on these pages are examples only: they name checkpoints that do not exist.
ILLUSTRATED = {
    f"docs/howto/{name}.md" for name in ("command-line", "export", "export-to-hugging-face", "other-formats")
}
# Tests of their own run the scripts on these pages.
OWN_TESTS = {"docs/howto/fsdp2.md"}
# By day the tests of these frameworks make the same calls.
NIGHTLY = ("bytecheckpoint", "fsdp1", "jax", "lightning", "orbax", "transformers")
AT_NIGHT = {f"docs/howto/{name}.md" for name in NIGHTLY}
# Scripts of this repository set up, measure, or run these very tests.
NOT_FOLLOWED = "scripts/"

# Elsewhere its processes are forked, which takes a tenth of the time.
TORCHRUN = "torchrun --nproc-per-node "
# Without pipes and other things of a shell.
FORKED = re.compile(rf"(?:{TORCHRUN}\d+|python) [\w.]+|reknit(?: [\w./=-]+)+")
# The shell prints the exit code of a command that fails.
OR_CODE = re.compile(r'(?: 2>/dev/null)? \|\| echo "exit code \$\?"$')
# The modules of `tests.warm` that save a script an import of seconds.
WARM = {"docs/howto/lightning.md": "lightning", "docs/howto/transformers.md": "trainers"}
# All of their snippets run in one process that is forked.
FORKED_PAGES = {"docs/howto/transformers.md"}
# The variables of torchrun.
LAUNCHED = re.compile(r"(?:LOCAL_)?(?:RANK|WORLD_SIZE)|MASTER_\w+|TORCHELASTIC_\w+")
# Agents print after the end of these, and a shell waits for that.
OUTLIVED = {'python ended.py || echo "exit code $?"'}
# Pages that show the output of their snippets and commands.
WITH_OUTPUTS = ["docs/tutorial.md", "docs/howto/drills.md"]

FOLLOWED = [name for name in NAMES if name not in {*WITH_OUTPUTS, *OWN_TESTS}]

WRITE = "REKNIT_WRITE_OUTPUTS"
"""With this environment variable, pages with outputs get the real ones."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("page", [name for name in FOLLOWED if is_night() or name not in AT_NIGHT])
def test_a_reader_can_follow_the_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in FORKED_PAGES:
        run(1, follow_alone, page, str(tmp_path), warm=WARM[page], joined=False)
        return
    monkeypatch.chdir(tmp_path)
    follow_all(page)


def follow_alone(page: str, folder: str) -> None:
    """Follow a page in this forked process, as one that no launcher has started."""
    leave_launcher()
    os.chdir(folder)
    follow_all(page)


def follow_all(page: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            run_snippet(block, page, names)
        elif block.language == "console" and page not in ILLUSTRATED:
            follow(block, page)


@pytest.mark.parametrize("page", WITH_OUTPUTS)
def test_a_page_shows_the_output_of_its_snippets_and_commands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text()
    found = blocks(text)
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[Printed] = []
    with captured() as stream:
        for block, after in pairwise([*found, Block("", "", 0)]):
            if block.file is not None:
                Path(block.file).write_text(block.text)
            elif block.language == "python":
                stream.seek(0)
                stream.truncate()
                run_snippet(block, page, names)
                shown = after.text if after.language == "text" else ""
                # A save in the background logs its end while the program goes on.
                until(partial(has_printed, stream, shown))
                line = after.line if after.language == "text" else 0
                outputs.append(Printed(line, shown, at_home(stream.getvalue())))
            elif block.language == "console":
                for command, line, shown in after_commands(block):
                    forked = FORKED.fullmatch(OR_CODE.sub("", command)) and command not in OUTLIVED
                    printed = ranks_printed(command) if forked else printed_by(command, block, page)
                    outputs.append(Printed(line, shown, at_home(printed)))
    if os.environ.get(WRITE):
        (ROOT / page).write_text(with_real_outputs(text, outputs))
        return
    shown_lines = [normalised(output.shown) for output in outputs]
    real_lines = [normalised(output.real) for output in outputs]
    assert shown_lines == real_lines, f"{WRITE}=1 writes the real outputs into the page"


def at_home(output: str) -> str:
    """Return the output with the reader's folder in place of the one here."""
    return output.replace(os.getcwd(), HERE)


def has_printed(stream: io.StringIO, shown: str) -> bool:
    return len(normalised(stream.getvalue())) >= len(normalised(shown))


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, but not for long: the next check names the missing part."""
    for _ in range(100):
        if condition():
            return
        sleep(0.05)


def run_snippet(block: Block, page: str, names: dict[str, Any]) -> None:
    """Run a snippet; empty lines in front of it give tracebacks the line of the page."""
    exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), names)


def test_the_first_example_goes_on_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = "docs/index.md"
    (example,) = [block.text for block in blocks((ROOT / page).read_text()) if block.language == "python"]
    for _ in range(2):
        exec(compile(example, ROOT / page, "exec"), {"__name__": "__main__"})
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["step_00000100", "step_00000200"]


def test_the_first_pages_say_how_to_install() -> None:
    for page in ("README.md", "docs/tutorial.md"):
        shell = [block.text for block in blocks((ROOT / page).read_text()) if block.language == "bash"]
        (command,) = [text.strip() for text in shell if text.startswith("pip install")]
        extras = re.search(r"\[(.*)\]", command)
        assert extras is not None, page
        assert set(extras[1].split(",")) <= set(metadata("reknit").get_all("Provides-Extra", [])), page


def test_commands_that_are_only_shown_are_spelled_right() -> None:
    for page in ILLUSTRATED:
        shown = [command for block in blocks((ROOT / page).read_text()) for command in commands(block)]
        assert shown, page
        for command in shown:
            program, *arguments = shlex.split(command)
            assert program == "reknit", page
            parser().parse_args(arguments)


def run_script(folder: str, output: str | None, script: str, *arguments: str) -> None:
    """Run a script in this process, which is one of a job; on demand its output is added to a file."""
    os.chdir(folder)
    sys.argv = [script, *arguments]
    with shown_in(output) if output else nullcontext():
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


def run_alone(folder: str, output: str | None, script: str, *arguments: str) -> int:
    """Run a script, or `reknit` itself, in this process as one that no launcher has started."""
    leave_launcher()
    if script != "reknit":
        run_script(folder, output, script, *arguments)
        return 0
    os.chdir(folder)
    with shown_in(output) if output else nullcontext():
        return main(arguments)


def leave_launcher() -> None:
    for name in [name for name in os.environ if LAUNCHED.fullmatch(name)]:
        del os.environ[name]


def by_ranks(
    command: str, output: str | None = None, warm: str = "plain", *, may_fail: bool = False
) -> list[int]:
    """Run a command of torchrun, Python or reknit in forked processes; return their exit codes."""
    call: Callable[..., int | None] = run_alone
    world, script = "1", shlex.split(command.removeprefix("python "))
    if command.startswith(TORCHRUN):
        world, *script = shlex.split(command.removeprefix(TORCHRUN))
        call = run_script
    ended = run(int(world), call, os.getcwd(), output, *script, warm=warm, some_die=may_fail, joined=False)
    codes = [one.code if isinstance(one, Died) else one or 0 for one in ended]
    assert may_fail or not any(codes), command
    return codes


def ranks_printed(command: str) -> str:
    """Run a command in forked processes; return their output on both streams."""
    alone = OR_CODE.sub("", command)
    with tempfile.NamedTemporaryFile("r") as output:
        failed = [code for code in by_ranks(alone, output.name, may_fail=alone != command) if code]
        code = 1 if alone.startswith(TORCHRUN) else failed[0] if failed else 0
        return output.read() + (f"exit code {code}\n" if failed else "")


def follow(block: Block, page: str) -> None:
    for command in commands(block):
        if command.startswith(NOT_FOLLOWED):
            continue
        if FORKED.fullmatch(command) or command.startswith(TORCHRUN):
            by_ranks(command, warm=WARM.get(page, "plain"))
        else:
            printed_by(command, block, page)


def printed_by(command: str, block: Block, page: str) -> str:
    """Run a command of a page in a shell; return its output on both streams."""
    folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        ["bash", "-c", command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{page}:{block.line}: {command}\n{done.stdout}"
    return done.stdout


def test_files_for_a_shell_or_a_cluster_can_be_parsed() -> None:
    found = [(page, block) for page in NAMES for block in blocks((ROOT / page).read_text())]
    for page, block in found:
        if block.language == "yaml":
            assert yaml.safe_load(block.text), f"{page}:{block.line}"
        elif block.language == "bash":
            done = subprocess.run(
                ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"
