"""Every public name is in the reference, and every name of reknit that a page teaches exists."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import reknit
from docs.error_catalog import CATALOG
from docs.parameters import MEANINGS, RECORDS, lines_for, meaning_of, parameters_of, unit_of
from reknit.errors import MissingExtraError
from reknit.options import LoadOptions, SaveOptions
from reknit.options.fields import scopes_of
from tests.docs.pages import ROOT

PAGES = [
    *(path for folder in ("docs", "docs/howto", "docs/reference") for path in (ROOT / folder).glob("*.md")),
    ROOT / "README.md",
]
PAGES.remove(ROOT / "docs/format.md")  # there, such names are keys in files
SPACES = ("policies", "transforms", "sinks")
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
    return (
        names | CATALOG.keys() | {f"errors.{code}" for code in CATALOG} | {"errors"}
    )  # the page has all of them


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


def called() -> list[str]:
    """Return the public names that a user calls: no results, records, options or base classes."""
    results = set(re.findall(r"autoclass:: reknit\.(\w+)\(\)", (ROOT / "docs/reference/api.md").read_text()))
    options = set(re.findall(r"autoclass:: reknit\.(\w+)", (ROOT / "docs/reference/options.md").read_text()))
    others = results | options | RECORDS | {name for name in public() if name.endswith("Error")}
    return [name for name in public() if name not in others]


def test_every_parameter_of_a_public_call_has_a_meaning() -> None:
    lost = []
    for name in called():
        try:
            kind = found(name)
        except MissingExtraError:  # a package is not installed here
            continue
        lost += [f"{name}.{each.name}" for each in parameters_of(kind) if not meaning_of(name, each.name)]
    assert lost == []


def test_every_meaning_is_of_a_parameter_that_exists() -> None:
    names = {*called(), "storage.registry.register", "storage.registry.open_storage", "register_framework"}
    pairs = {(name, each.name) for name in names for each in parameters_of(found(name))}
    shown = {parameter for _, parameter in pairs} | {f"{name}.{parameter}" for name, parameter in pairs}
    assert sorted(MEANINGS.keys() - shown - {"config"}) == []


def test_a_parameter_is_listed_with_type_default_unit_and_meaning() -> None:
    def call(path: str, *, poll_s: float = 1.5, size_nbytes: int = 8) -> None: ...

    assert lines_for("reknit.call", call)[2:-1] == [
        "- ``path`` (``str``, required): folder or URL of a checkpoint",
        "- ``poll_s`` (``float``, default ``1.5``, in seconds): pause between two looks",
        "- ``size_nbytes`` (``int``, default ``8``, in bytes)",
    ]
    assert [unit_of(name) for name in ("bytes_per_s", "hours", "steps")] == [
        "bytes per second",
        "hours",
        None,
    ]


def test_a_name_that_a_page_teaches_exists() -> None:
    taught = {(match[1][1:], page) for page in PAGES for match in NAME.finditer(page.read_text())}
    lost = []
    for name, page in sorted(taught):
        if f"reknit.{name}".endswith(FILES):
            continue
        try:
            found(name)
        except MissingExtraError:  # a package is not installed here
            continue
        except (AttributeError, ImportError):
            lost.append((name, page.name))
    assert lost == []


def table(kind: type[Any]) -> str:
    """Return the table of the scopes of the options of a class."""
    rows = [[f"`{kind.__name__}`", *COLUMNS[kind].values()], ["---", *([":-:"] * len(COLUMNS[kind]))]]
    for name, scopes in scopes_of(kind).items():
        rows.append([f"`{name}`", *("yes" if scope in scopes else "" for scope in COLUMNS[kind])])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_of_options_shows_the_scopes_of_each_option() -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    for kind, columns in COLUMNS.items():
        assert table(kind) in page, table(kind)
        assert {scope for scopes in scopes_of(kind).values() for scope in scopes} == columns.keys()
