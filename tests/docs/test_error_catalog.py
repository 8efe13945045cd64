"""The catalogue of errors: all of them are in it, and their pages exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from docs.error_catalog import CATALOG, codes
from reknit import errors
from reknit.errors import ReknitError
from tests.docs.test_links import exists

SOURCE = Path(__file__).parents[2] / "src"


def every_error(kind: type[ReknitError] = ReknitError) -> set[str]:
    """Return the names of the public errors: those of the module, not those of other tests."""
    found = {kind.__name__} if kind.__module__ == errors.__name__ else set()
    return found.union(*(every_error(sub) for sub in kind.__subclasses__()))


def test_every_public_error_is_in_the_catalogue_in_the_order_of_the_tree() -> None:
    assert list(CATALOG) == codes()
    assert set(codes()) == every_error()
    tree = (errors.__doc__ or "").split("Every error has")[0]
    assert re.findall(r"^[ │├└─]*(\w+Error)\b", tree, re.MULTILINE) == codes()


def test_no_message_names_a_page_of_the_source() -> None:
    """Users of the package do not have it."""
    named, found = re.compile(r"docs/[\w/-]+\.md"), []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text))) if named.search(text) else []
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            f"{path}:{node.lineno}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings and named.search(node.value)
        ]
    assert found == []


def test_the_pages_of_an_error_exist_with_their_sections() -> None:
    named = [(code, page) for code, explanation in CATALOG.items() for page in explanation.pages]
    assert named
    assert [(code, page) for code, page in named if not exists(page, "docs/index.md")] == []
