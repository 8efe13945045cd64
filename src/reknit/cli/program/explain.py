"""`reknit explain`: the meaning of an error, its usual causes, and the remedies."""

from __future__ import annotations

import inspect
import textwrap
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from reknit import errors
from reknit.cli.output import print_fields, print_json
from reknit.cli.program.error_catalog import CATALOG
from reknit.errors import ReknitError, UsageError, nearest, shown

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PAGE = "reference/errors.md"
_SOURCE = Path(__file__).parents[4]
"""The root of a copy of the source; nothing of reknit's where it is installed."""
_WIDTH = 100
_TOO_WIDE = ("ReknitError", "UsageError")
"""Errors with so many causes that only their own messages help."""


def codes() -> list[str]:
    """Return the codes of all public errors, in the order of the tree."""
    return [
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, ReknitError) and not name.startswith("_")
    ]


def kind_of(code: str) -> type[ReknitError]:
    """Return the class of a code."""
    kind: type[ReknitError] = getattr(errors, code)
    return kind


def parents_of(code: str) -> list[str]:
    """Return the codes of the errors that an `except` may name to catch this one, the narrowest first."""
    bases = inspect.getmro(kind_of(code))[1:]
    return [base.__name__ for base in bases if issubclass(base, ReknitError)]


def meaning_of(code: str) -> str:
    """Return the meaning of an error: the docstring of its class, each paragraph on one line."""
    paragraphs = inspect.cleandoc(kind_of(code).__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program."""
    parser = commands.add_parser(
        "explain",
        help="explain an error: its meaning, its usual causes, and the remedies",
        description="Explain an error by the name of its type, which tracebacks and messages show.  "
        "Without a name, list all errors.",
    )
    code = parser.add_argument("code", metavar="CODE", nargs="?", help="the name of an error: CorruptError")
    code.completer = lambda **_: codes()  # type: ignore[attr-defined]  # read by argcomplete
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain an error, or list all, and return the exit code.  Raises `UsageError` for an unknown one."""
    if args.code is None:
        meanings = {code: meaning_of(code).partition("\n\n")[0] for code in codes()}
        if args.json:
            print_json(meanings)
        else:
            print_fields(meanings)
        return 0
    code = _known(args.code)
    if args.json:
        found = CATALOG[code] if _base() else CATALOG[code]._replace(pages=())
        print_json({"code": code, "meaning": meaning_of(code), **found._asdict()})
    else:
        print("\n".join(_lines(code)))
    return 0


def hint(error: ReknitError) -> str | None:
    """Return the command that explains an error, or None for one that only its own message explains."""
    code = type(error).__name__
    return f"reknit explain {code}" if code in CATALOG and code not in _TOO_WIDE else None


def _known(text: str) -> str:
    """Return the code for a name as a traceback or a person writes it.  Raises `UsageError`."""
    name = text.rpartition(".")[2].rstrip(":")
    by_lower = {code.lower(): code for code in codes()}
    for each in (name.lower(), f"{name.lower()}error"):
        if each in by_lower:
            return by_lower[each]
    near = nearest(name, codes()) or nearest(f"{name}Error", codes())
    raise UsageError(
        f"there is no error {shown(text)}",
        remedy=f"did you mean {near[0]!r}?" if near else "reknit explain lists all errors",
    )


def _lines(code: str) -> Iterator[str]:
    found = CATALOG[code]
    yield f"{code} ({', '.join(parents_of(code))})" if parents_of(code) else code
    for paragraph in meaning_of(code).split("\n\n"):
        yield from textwrap.wrap(paragraph, _WIDTH)
    for title, texts in (("Usual causes", found.causes), ("What to do", found.remedies)):
        yield ""
        yield f"{title}:"
        for text in texts:
            yield from textwrap.wrap(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    if base := _base():
        yield ""
        yield "Pages:"
        for page in (f"{_PAGE}#{code.lower()}", *found.pages):
            yield f"  {base}{page.replace('.md', '.html') if '://' in base else page}"


def _base() -> str | None:
    """Return the beginning of the addresses of pages: the site of this release, or the folder in the source.

    An installed package without a site has no pages to name.
    """
    try:
        listed = metadata("reknit").get_all("Project-URL") or []
    except PackageNotFoundError:  # a copy that is not installed
        listed = []
    sites = [url for name, _, url in (one.partition(", ") for one in listed) if name == "Documentation"]
    if sites:
        return f"{sites[0].rstrip('/')}/"
    return "docs/" if (_SOURCE / "docs" / _PAGE).is_file() else None
