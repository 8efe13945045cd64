"""The mistakes that some test must notice: the mutants in the files of this folder, one for each room."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

CATALOG = Path(__file__).parent
SOURCES = "src/reknit"


class Mutant(msgspec.Struct, forbid_unknown_fields=True):
    """A mistake: in `file` (below the sources), `new` replaces `old`, and one of `tests` must fail.

    `survives` is the reason why no test fails as yet, for a known survivor.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    survives: str = ""
    room: str = ""

    def read(self, root: Path) -> str:
        """Return the text of the file that it changes."""
        return (root / SOURCES / self.file).read_text()

    def stale(self, root: Path) -> str | None:
        """Return the reason if it cannot be made of the tree at `root` any more, else None."""
        try:
            found = self.read(root).count(self.old)
        except FileNotFoundError:
            return f"there is no {SOURCES}/{self.file}"
        if found != 1:
            return f"{SOURCES}/{self.file} has its text {found or 'no'} times"
        for test in self.tests:
            path, _, name = test.partition("[")[0].partition("::")
            if not (root / path).exists():
                return f"there is no {path}"
            text = (root / path).read_text()
            if not any(f"{kind} {name}(" in text for kind in ("def", "class")) and name:
                return f"{path} has no {name}"
        try:
            compile(self.mutated(root), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            return f"its result is not Python: {error}"
        return None

    def mutated(self, root: Path) -> str:
        """Return the text of the file with the mistake in it."""
        return self.read(root).replace(self.old, self.new)


class _Room(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


def mutants(folder: Path = CATALOG, patterns: Sequence[str] = ()) -> list[Mutant]:
    """Return the mutants of a folder whose room, file or name contains one of the `patterns`."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for mutant in msgspec.toml.decode(path.read_bytes(), type=_Room).mutant:
            mutant.room = path.stem
            reported = f"{path.stem}: {mutant.file}: {mutant.name}"
            if not patterns or any(fnmatch(reported, f"*{pattern}*") for pattern in patterns):
                found.append(mutant)
    return found
