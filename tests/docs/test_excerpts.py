"""Parts of larger programs on pages are Python, and call reknit with parameters that exist."""

from __future__ import annotations

import ast
import inspect
from typing import Any

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


def test_excerpts_call_what_is_there() -> None:
    for page in PAGES:
        names: dict[str, Any] = {"reknit": reknit}
        found = blocks((ROOT / page).read_text())
        excerpts = [ast.parse(block.text) for block in found if block.language == "{code-block} python"]
        called = 0
        for node in (node for excerpt in excerpts for node in ast.walk(excerpt)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("reknit"):
                exec(compile(ast.Module([node], []), page, "exec"), names)
            elif isinstance(node, ast.Call) and (function := resolved(node.func, names)) is not None:
                keywords = {str(keyword.arg): keyword.value for keyword in node.keywords}
                inspect.signature(function).bind(*node.args, **keywords)
                called += 1
        assert called, page
