"""Running the program inside the test's process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Ran(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """`command("ls", path)` runs ``reknit ls path``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Ran:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Ran(code, *self._capsys.readouterr())


def damage(path: Path, at: int = -1) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
