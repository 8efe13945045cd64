from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.cli import ls
from reknit.cli.main import exit_code, in_flags, main
from tests.cli.command import damage

if TYPE_CHECKING:
    from tests.cli.command import Command

COMMANDS = ("ls", "show", "verify", "diff", "export")
PROGRAM = Path(sys.executable).with_name("reknit")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    reknit.save(tmp_path / "c", {"model": {"w": np.ones(4)}}, step=3)
    return tmp_path / "c"


def test_the_program_needs_no_torch(path: Path) -> None:
    code = (
        "import sys; from reknit.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    arguments = ["diff", str(path), str(path), "--data"]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_help_names_commands_and_exit_codes(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in (*COMMANDS, "exit codes:", "130"))
    for name in COMMANDS:
        assert command(name, "--help").code == 0


def test_a_path_without_a_checkpoint_is_code_three(command: Command, path: Path) -> None:
    absent = path.parent / "absent"
    for arguments in (
        ("show", absent),
        ("verify", absent),
        ("diff", path, absent),
        ("export", "hf", absent, "x"),
    ):
        ran = command(*arguments)
        assert (ran.code, ran.out) == (3, ""), arguments
        assert ran.err.startswith(f"reknit: there is no committed checkpoint at {absent}"), arguments
        assert "->" in ran.err, arguments


def test_a_damaged_checkpoint_is_code_four(command: Command, path: Path) -> None:
    other, out = path.parent / "other", path.parent / "out"
    reknit.save(other, {"model": {"w": np.ones(4)}})
    damage(other / "manifest.json", at=30)
    for arguments in (("show", other), ("diff", path, other), ("export", "hf", other, out)):
        ran = command(*arguments)
        assert ran.code == 4, arguments
        assert ran.err.startswith("reknit: the manifest"), arguments


def test_an_unknown_store_is_code_two(command: Command) -> None:
    ran = command("show", "gopher://somewhere")
    assert ran.code == 2
    assert "gopher" in ran.err


def test_every_error_has_an_exit_code() -> None:
    errors = (
        "StorageFullError",
        "MismatchError",
        "StorageNotFoundError",
        "MissingExtraError",
        "ShortageError",
    )
    assert [exit_code(getattr(reknit.errors, name)("x")) for name in errors] == [4, 4, 3, 2, 5]


def test_a_place_that_is_taken_is_code_two_and_nothing_damaged(command: Command, path: Path) -> None:
    other = path.parent / "taken"
    reknit.save(other, {"model": {"w": np.ones(4)}})
    ran = command("promote", path, other)
    assert ran.code == 2
    assert "there is a committed checkpoint at this path already" in ran.err


def test_an_interrupt_is_code_130_and_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def interrupted(storage: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "rows_of", interrupted)
    assert command("ls", path) == (130, "", "reknit: interrupted\n")


def test_a_full_disk_is_one_line_and_code_six(path: Path) -> None:
    for unbuffered, argument in (("", str(path)), ("1", str(path)), ("", "--help")):
        with open("/dev/full", "w") as full:
            ran = subprocess.run(
                [sys.executable, "-m", "reknit", "show", argument],
                stdout=full,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
                text=True,
                check=False,
            )
        said = "reknit: the output could not be written, and is incomplete: No space left on device\n"
        assert (ran.returncode, ran.stderr) == (6, said), (unbuffered, argument)


def test_closed_streams_are_no_error(path: Path) -> None:
    command = f"{sys.executable} -m reknit"
    ran = subprocess.run(["bash", "-c", f"{command} ls {path} >&- 2>&-"], check=False)
    assert ran.returncode == 0


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    # The first prints more than a buffer holds.  The reader is gone before the first byte.
    reknit.save(tmp_path / "c", {"model": {f"layer.{k:03d}." + "x" * 60: np.ones(1) for k in range(300)}})
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for arguments in (("show", "c", "--tensors", "*"), ("ls", "."), ("--help",)):
        reader, writer = os.pipe()
        os.close(reader)
        command = [str(PROGRAM), *arguments]
        ran = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=buffered, check=False
        )
        os.close(writer)
        assert (ran.returncode, ran.stderr) == (141, b""), arguments


def test_a_shell_that_asks_how_to_go_on_is_told_by_argcomplete(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[argparse.ArgumentParser] = []
    monkeypatch.setitem(sys.modules, "argcomplete", SimpleNamespace(autocomplete=asked.append))
    command("--version")
    assert asked == [], "nobody asks"
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    command("--version")
    assert [program.prog for program in asked] == ["reknit"]
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert command("--version").code == 0


def test_a_remedy_names_the_flags_of_the_command() -> None:
    args = argparse.Namespace(overwrite=False, keep_tied=False)
    reported = in_flags("pass overwrite=True, keep_tied=True or cast=True", args)
    assert reported == "pass --overwrite, --keep-tied or cast=True"


def test_a_terminal_that_lacks_a_letter_gets_it_escaped(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"modèle": {"w": np.ones(1)}})
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(
        [str(PROGRAM), "ls", str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0
    assert "mod\\xe8le" in ran.stdout


def test_a_command_imports_no_module_of_another_one(tmp_path: Path) -> None:
    script = (
        "import sys; from reknit.cli.main import main; main(['latest', sys.argv[1]]); "
        "print(*(name for name in sys.modules if name.startswith('reknit.cli.')))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "reknit.cli.ls" in loaded
    assert not {"reknit.cli.show", "reknit.cli.export", "reknit.cli.report"} & set(loaded)


def test_a_command_of_a_distribution_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "acme-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[reknit.commands]\ncount = acme_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["count", "x"]) == 2
    said = capsys.readouterr().err
    assert "the distribution acme brings 'count' (acme_of_nobody) to reknit.commands" in said
    assert "correct or uninstall acme" in said
    assert main(["latest", str(tmp_path)]) == 3
    assert "acme" not in capsys.readouterr().err.replace(str(tmp_path), "")
