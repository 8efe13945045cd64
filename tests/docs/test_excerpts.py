"""Parts of larger programs on pages are Python, and call reknit with parameters that exist."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest

import reknit
from tests.docs.pages import ROOT, blocks

# The programs around them need a job of the framework; tests of the frameworks run such jobs.
PAGES = [f"docs/howto/{name}.md" for name in ("accelerate", "deepspeed", "lightning", "megatron", "vescale")]


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of an expression of names and attributes, None where it begins with another name."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolved(node.value, names)) is not None:
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", PAGES)
def test_excerpts_call_what_is_there(page: str) -> None:
    names: dict[str, Any] = {"reknit": reknit}
    called = 0
    for block in blocks((ROOT / page).read_text()):
        if block.language != "{code-block} python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("reknit"):
                statement = ast.Module([node], [])
                exec(compile(statement, page, "exec"), names)
            elif isinstance(node, ast.Call) and (function := resolved(node.func, names)) is not None:
                keywords = {str(keyword.arg): keyword.value for keyword in node.keywords}
                inspect.signature(function).bind(*node.args, **keywords)
                called += 1
    assert called
