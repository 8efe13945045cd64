"""Counts of the source: modules, folders, lines of code, and calls with many arguments by position."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from tests.way.trace import SOURCES

PLUGINS = ("cli/", "dataloader/", "integrations/", "monitor/", "sinks.py", "stores/", "testing/")
"""The parts of the source that are not the core."""
MANY = 7
"""Arguments by position that are too many for a reader."""


class Module(NamedTuple):
    """The counts of one module."""

    code_lines: int
    crowded_calls: int


def house() -> dict[str, int]:
    """Return the counts of the source, by their names."""
    root = Path(SOURCES)
    modules = {
        path.relative_to(root).as_posix(): counted(path.read_text("utf-8")) for path in root.rglob("*.py")
    }
    plugins = [module.code_lines for path, module in modules.items() if is_plugin(path)]
    lines = sum(module.code_lines for module in modules.values())
    return {
        "modules": len(modules),
        "folders": len({path.rpartition("/")[0] for path in modules}),
        "code lines": lines,
        "code lines of the core": lines - sum(plugins),
        "code lines of plug-ins": sum(plugins),
        f"calls with {MANY} arguments by position": sum(module.crowded_calls for module in modules.values()),
    }


def is_plugin(path: str) -> bool:
    """Return whether the module at a path below the source is outside the core."""
    return path.startswith(PLUGINS)


def counted(source: str) -> Module:
    """Return the counts of a module.  Docstrings, comments and empty lines are not code."""
    code = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    documented: set[int] = set()
    crowded = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.update(lines_of(node))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):  # an empty line of a text is code
            code.update(lines_of(node))
        elif isinstance(node, ast.Call):
            crowded += len(node.args) >= MANY
    return Module(len(code - documented), crowded)


def lines_of(node: ast.expr | ast.Expr) -> range:
    """Return the numbers of the lines of a node."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
