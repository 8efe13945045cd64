"""Which tests are skipped for want of a device?  None: such tests run on the simulated one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]
SUITES = TESTS.parent / "src" / "reknit" / "testing"

EXCUSED = {
    "devices.py: run_simulated": "without a C++ compiler there is no simulated device",
    "frameworks/test_generators.py: test_the_state_of_a_gpu_is_noted_where_there_is_none": "there is one",
}
"""The places that may skip a test because of a device, and why."""

_SKIPS = {"skip", "skipif", "importorskip", "xfail"}
_DEVICES = re.compile(r"gpu|cuda|accelerator|device|nvidia|rocm|\bxpu|\bnpu|\bhpu|\bmps", re.IGNORECASE)


def skips(source: str) -> Iterator[tuple[str, str]]:
    """Yield each place that may skip a test, and its text: the call, with the condition if there is one."""
    for node in ast.parse(source).body:
        name = getattr(node, "name", "the module")
        for inside in ast.walk(node):
            if isinstance(inside, ast.If):
                if any(map(_is_skip, map(_call, inside.body))):
                    yield name, ast.unparse(inside)
            elif isinstance(inside, ast.Call) and _is_skip(inside):
                yield name, ast.unparse(inside)


def _call(statement: ast.stmt) -> ast.expr | None:
    return getattr(statement, "value", None)


def _is_skip(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "attr", getattr(node.func, "id", None)) in _SKIPS


def for_want_of_a_device(source: str) -> set[str]:
    """Return the places that may skip a test and name a device."""
    if not ("skip" in source or "xfail" in source):
        return set()
    asks = "accelerator import" in source  # whether the simulated device can be built
    return {name for name, said in skips(source) if _DEVICES.search(said) or (asks and "why_not" in said)}


def test_no_test_is_skipped_for_want_of_a_device() -> None:
    files = [(path, root) for root in (TESTS, SUITES) for path in sorted(root.rglob("*.py"))]
    found = {
        f"{path.relative_to(root)}: {name}"
        for path, root in files
        if path != Path(__file__)
        for name in for_want_of_a_device(path.read_text())
    }
    assert found == set(EXCUSED)
