"""`reknit explain`, and the catalogue that it shares with the page of errors."""

from __future__ import annotations

import ast
import re
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reknit import errors
from reknit.cli.program import explain
from reknit.cli.program.error_catalog import CATALOG
from reknit.cli.program.explain import codes, hint
from reknit.errors import CorruptError, ReknitError, StorageError, UsageError

if TYPE_CHECKING:
    from tests.cli.command import Command

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


@pytest.mark.parametrize("code", CATALOG)
def test_an_error_is_explained_with_all_that_the_catalogue_has(command: Command, code: str) -> None:
    ran = command("explain", code)
    assert (ran.code, ran.err) == (0, "")
    shown = " ".join(ran.out.split())
    for text in (*CATALOG[code].causes, *CATALOG[code].remedies):
        assert f"- {text}" in shown
    assert f"docs/reference/errors.md#{code.lower()}" in shown
    assert command("explain", code, "--json").json["causes"] == list(CATALOG[code].causes)


def test_pages_are_on_the_site_of_the_release(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Message()
    listed["Project-URL"] = "Source, https://example.com/code"
    listed["Project-URL"] = "Documentation, https://example.com/pages/"
    monkeypatch.setattr(explain, "metadata", lambda _: listed)
    shown = command("explain", "CorruptError").out
    assert "https://example.com/pages/reference/errors.html#corrupterror" in shown
    assert "docs/" not in shown


def test_an_installed_package_without_a_site_names_no_pages(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(explain, "metadata", lambda _: Message())
    monkeypatch.setattr(explain, "_SOURCE", tmp_path)
    for code in CATALOG:
        shown = command("explain", code).out
        assert "What to do:" in shown
        assert "Pages:" not in shown
        assert ".md" not in shown
        assert command("explain", code, "--json").json["pages"] == []


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


def test_without_a_code_all_errors_are_listed(command: Command) -> None:
    ran = command("explain")
    assert [line.split()[0] for line in ran.out.splitlines()] == codes()
    assert list(command("explain", "--json").json) == codes()


@pytest.mark.parametrize("name", ["corrupterror", "reknit.errors.CorruptError:", "corrupt"])
def test_a_name_is_found_as_a_traceback_or_a_person_writes_it(command: Command, name: str) -> None:
    assert command("explain", name).out == command("explain", "CorruptError").out


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("CoruptError", "did you mean 'CorruptError'?"), ("qqqq", "reknit explain lists all errors")],
)
def test_a_typo_is_answered_with_the_nearest_code(command: Command, name: str, remedy: str) -> None:
    ran = command("explain", name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"reknit: there is no error '{name}'\n  -> {remedy}\n"


def test_a_command_that_fails_names_the_one_that_explains_why(command: Command, tmp_path: Path) -> None:
    ran = command("show", tmp_path / "absent")
    assert ran.err.endswith("\n  -> more: reknit explain CheckpointNotFoundError\n")
    assert command("prune", tmp_path).err.count("explain") == 0, "only the message helps with a wrong call"


def test_an_error_of_a_store_of_ones_own_has_no_hint() -> None:
    class TapeError(StorageError):
        """The tape is torn."""

    assert hint(TapeError("torn")) is None
    assert hint(UsageError("wrong")) is None
    assert hint(CorruptError("damaged")) == "reknit explain CorruptError"
