"""Every public name is in the reference, and every name of reknit that a page teaches exists."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

import reknit
from reknit import errors
from reknit.errors import MissingExtraError
from reknit.options import LoadOptions, SaveOptions
from reknit.options.fields import scopes_of
from tests.docs.pages import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/howto").glob("*.md"))
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/reference").glob("*.md"))
PAGES = [*PAGES, "README.md"]
PAGES.remove("docs/format.md")  # there, such names are keys in files
SPACES = ("policies", "transforms", "sinks", "alerts")
NAME = re.compile(r"(?<![\w./-])reknit((?:\.[A-Za-z_]\w*)+)")
COLUMNS = {
    SaveOptions: {
        "save": "`save(wait=True)`",
        "background": "`save(wait=False)`",
        "promote": "`promote`",
        "agent": "sent with each save",
        "start": "read once",
    },
    LoadOptions: {"load": "`load`", "open": "`open`", "verify": "`verify`"},
}
FILES = (".md", ".json", ".sh", ".toml", ".py")


def documented() -> set[str]:
    """Return the names that the reference has, without `reknit.`."""
    text = "\n".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    names = set(re.findall(r"auto(?:class|function):: reknit\.([\w.]+)", text))
    for module, members in re.findall(r"automodule:: reknit\.(\w+)\n +:members:([^`:]*)", text):
        names |= {module} | {f"{module}.{name.strip()}" for name in members.split(",")}
    return names | vars(errors).keys()  # all members of which are there


def public() -> list[str]:
    """Return every public name, as users write it after `reknit.`."""
    inside = ((space, import_module(f"reknit.{space}").__all__) for space in SPACES)
    return [*reknit.__all__, *(f"{space}.{name}" for space, names in inside for name in names)]


def test_every_public_name_is_in_the_reference() -> None:
    assert sorted(set(public()) - documented()) == []


def found(name: str) -> Any:
    """Return the object of a dotted name below `reknit`; raises `AttributeError` or `ImportError`."""
    here: Any = reknit
    for number, part in enumerate(parts := name.split(".")):
        try:
            here = getattr(here, part)
        except AttributeError:
            here = import_module("reknit." + ".".join(parts[: number + 1]))
    return here


@pytest.mark.parametrize("page", PAGES)
def test_a_name_that_a_page_teaches_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    lost = []
    for name in {match[1][1:] for match in NAME.finditer(text)}:
        if f"reknit.{name}".endswith(FILES):
            continue
        try:
            found(name)
        except MissingExtraError:  # a package is not installed here
            continue
        except (AttributeError, ImportError):
            lost.append(name)
    assert sorted(lost) == []


def table(kind: type[Any]) -> str:
    """Return the table of the scopes of the options of a class."""
    rows = [[f"`{kind.__name__}`", *COLUMNS[kind].values()], ["---", *([":-:"] * len(COLUMNS[kind]))]]
    for name, scopes in scopes_of(kind).items():
        rows.append([f"`{name}`", *("yes" if scope in scopes else "" for scope in COLUMNS[kind])])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.parametrize("kind", COLUMNS)
def test_the_page_of_options_shows_the_scopes_of_each_option(kind: type[Any]) -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    assert table(kind) in page, table(kind)
    assert {scope for scopes in scopes_of(kind).values() for scope in scopes} == COLUMNS[kind].keys()
