"""The catalogue of errors: all of them are in it, and their pages exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs.error_catalog import CATALOG, codes
from reknit import errors
from reknit.errors import ReknitError

DOCS = Path(__file__).parents[2] / "docs"
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
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += [
            f"{path}:{node.lineno}"
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in docstrings and re.search(r"docs/[\w/-]+\.md", node.value)
        ]
    assert found == []


@pytest.mark.parametrize("code", CATALOG)
def test_the_pages_of_an_error_exist_with_their_sections(code: str) -> None:
    for page in CATALOG[code].pages:
        path, _, anchor = page.partition("#")
        headings = re.findall(r"^#+ (.+)$", (DOCS / path).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, page
