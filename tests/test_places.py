"""The places of the tests of a module, and their view of it from outside."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "reknit"

PRIVATE = re.compile(r"\b_\w+")
# Of NamedTuple, of the operating system, and of IPython.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit", "_repr_html_"}
# Torch, DeepSpeed and argparse have names that modules here have, too.
FOREIGN = {
    "_Options",
    "_actions",
    "_devices",
    "_handle",
    "_hp_optimizer_states_linked",
    "_iterator",
    "_shapes",
    "_spec",
    "_strides",
    "_threads",
    "_timeout",
    "_world",
}


def is_private(name: str) -> bool:
    """Return whether a name is for its own module only."""
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC | FOREIGN


def private_names(folder: Path) -> set[str]:
    """Return the private names that a tree of modules defines."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return set(filter(is_private, found))


def looks_inside(source: str, private: set[str]) -> Iterator[str]:
    """Yield each use of a private name of reknit in a test, with its line."""
    tree = ast.parse(source)
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "reknit":
            yield from (f"{node.lineno}: {a.name}" for a in node.names if is_private(a.name))
        elif isinstance(node, ast.Attribute) and node.attr in private - own:
            yield f"{node.lineno}: {ast.unparse(node)}"


def place_of(module: Path) -> str | None:
    """Return the place of a module's tests: a file of its name, or the entry in the README of the folder."""
    package = TESTS / module.relative_to(SOURCES).parts[0] if module.parent != SOURCES else TESTS
    named = [f"test_{module.stem}.py", f"test_{module.parent.name}_{module.stem}.py"]
    for path in package.rglob("test_*.py") if package != TESTS else package.glob("test_*.py"):
        if path.name in named:
            return path.name
    readme = (package if package.exists() else TESTS) / "README.md"
    shown = module.relative_to(SOURCES / package.name if readme.parent != TESTS else SOURCES).as_posix()
    for line in readme.read_text().splitlines() if readme.exists() else ():
        if f"`{shown}`" in line:
            tests: list[str] = re.findall(r"`((?:\w+/)*test_\w+\.py)", line)
            if tests and all((TESTS / test).exists() for test in tests):
                return tests[0]
    return None


def test_tests_see_no_private_names() -> None:
    private = private_names(SOURCES)
    texts = {path.relative_to(TESTS): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    suspects = {path: text for path, text in texts.items() if private & {*PRIVATE.findall(text)}}
    reported = [f"{path}:{use}" for path, text in suspects.items() for use in looks_inside(text, private)]
    assert reported == []


def test_each_module_has_a_place_where_its_tests_are() -> None:
    modules = sorted(path for path in SOURCES.rglob("*.py") if path.name != "__init__.py")
    assert [str(path.relative_to(SOURCES)) for path in modules if place_of(path) is None] == []


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("from reknit.api import _save", 1),
        ("import reknit\nx = reknit.api._hidden", 1),
        ("x._hidden = 1", 1),
        ("class A:\n    def f(self) -> None:\n        self._hidden = 1\n        other._hidden", 0),
        ("x._replace(a=1)\ny._of_another_library", 0),
    ],
)
def test_a_look_inside_is_noticed(source: str, number: int) -> None:
    assert len(list(looks_inside(source, {"_hidden"}))) == number
