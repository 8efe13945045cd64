from __future__ import annotations

import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from reknit.errors import UsageError
from tests.accelerator import why_not
from tests.accelerator.build import build
from tests.forks import forking


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the built library in an empty folder."""
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    return tmp_path


def test_without_a_compiler_or_ninja_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    assert "pip install ninja" in str(why_not())
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert "'no-such-compiler'" in str(why_not())
    with pytest.raises(UsageError, match="no-such-compiler"):
        build()


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_torch_that_has_devices_of_its_own_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(torch.version, kind, "13.0")
    assert "built for the CPU only" in str(why_not())


class Compiler:
    """A build that counts its calls, and only creates a library."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, name: str, build_directory: str, **options: Any) -> types.ModuleType:
        with open(self.root / "calls", "a") as calls:
            calls.write("x")
        Path(build_directory, f"{name}.so").write_text("the library")
        return types.ModuleType(name)

    def failing(self, build_directory: str, **options: Any) -> None:
        Path(build_directory, "half.o").touch()
        raise RuntimeError("error: expected ';'")


def test_of_two_builders_at_once_one_compiles(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extension, "load", Compiler(root).load)
    monkeypatch.setattr("tests.accelerator.build._imported", lambda path: path.read_text())
    context: Any = multiprocessing.get_context("fork")
    builders = [context.Process(target=build) for _ in range(4)]
    with forking():
        for builder in builders:
            builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0] * 4
    assert (root / "calls").read_text() == "x"
    assert build() == "the library"  # which is imported, and not built again


def test_a_build_that_fails_leaves_nothing_and_shows_the_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_extension, "load", Compiler(root).failing)
    with pytest.raises(RuntimeError, match="expected"):
        build()
    assert [path.suffix for path in root.iterdir()] == [".lock"]


def test_programs_of_the_environment_of_python_are_found_during_the_build(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def is_ninja_available() -> bool:
        seen.append(os.environ["PATH"])
        return True

    monkeypatch.setattr(cpp_extension, "is_ninja_available", is_ninja_available)
    before = os.environ["PATH"]
    assert why_not() is None
    assert os.path.dirname(sys.executable) in seen[0].split(os.pathsep)
    assert os.environ["PATH"] == before
