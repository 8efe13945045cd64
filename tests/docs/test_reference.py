"""Every public name is in the reference, and every name of reknit that a page teaches exists."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

import reknit
from reknit import errors
from tests.docs.pages import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/howto").glob("*.md"))
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/reference").glob("*.md"))
PAGES = [*PAGES, "README.md"]
PAGES.remove("docs/format.md")  # there, such names are keys in files
SPACES = ("policies", "transforms", "sinks", "alerts")
NAME = re.compile(r"(?<![\w./-])reknit((?:\.[A-Za-z_]\w*)+)")
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
    """Return what a dotted name below `reknit` stands for; raises `AttributeError` or `ImportError`."""
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
        except (AttributeError, ImportError):
            lost.append(name)
    assert sorted(lost) == []
