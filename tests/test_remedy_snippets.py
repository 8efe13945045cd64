"""Calls, options and command lines in messages of reknit exist, also in messages that no test provokes."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.cli.main import parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[1] / "src" / "reknit"
CLASSES = {
    name: getattr(reknit, name) for name in ("LoadOptions", "SaveOptions", "CommOptions", "Checkpointer")
}
PREFIX = re.compile(r"\b(reknit\.[a-z_.]+[A-Za-z_]*|LoadOptions|SaveOptions|CommOptions|Checkpointer)\(")
KEYWORD = re.compile(r"(?<![\w.])([a-z_]+)=(?!=)")
FIELD = re.compile(r"\b(LoadOptions|SaveOptions|CommOptions)\.([a-z_]+)")
COMMAND = re.compile(r"(`?)\breknit ([a-z][a-z-]*)((?: --[a-z-]+| [{}A-Z]+\b| \{\}| [0-9]+)*)")


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return the texts of the source, read once."""
    return tuple(read_texts())


def read_texts() -> Iterator[tuple[str, str]]:
    """Yield the texts of the source without docstrings, with their places; a value in one is `{}`."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inside:
                continue
            place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield place, node.value
            elif isinstance(node, ast.JoinedStr):
                yield (
                    place,
                    "".join(
                        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
                        for part in node.values
                    ),
                )


def arguments(text: str, start: int) -> str:
    """Return the text from an opening parenthesis to the one that closes it, without inner calls."""
    depth, found = 0, ""
    for letter in text[start:]:
        depth -= letter in ")]}"
        if depth == 0 and letter in ")]}":
            return found
        found += letter if depth == 1 else ""
        depth += letter in "([{"
    return found


def target(name: str) -> Any:
    """Return the object that a message names."""
    if name in CLASSES:
        return CLASSES[name]
    found: Any = reknit
    for part in name.split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(f"{found.__name__}.{part}")
    return found


def calls() -> dict[str, tuple[str, list[str]]]:
    return {
        f"{place} {match[1]}": (match[1], KEYWORD.findall(arguments(text, match.end() - 1)))
        for place, text in texts()
        for match in PREFIX.finditer(text)
    }


def command_lines() -> dict[str, tuple[str, list[str]]]:
    """Return the command lines, with their options.  Without quotes, `reknit` may begin a sentence."""
    known = subcommands()
    return {
        f"{place} {match[0]}": (match[2], re.findall(r"--[a-z-]+", match[3]))
        for place, text in texts()
        for match in COMMAND.finditer(text)
        if match[1] or match[2] in known
    }


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands."""
    (found,) = (action for action in parser()._actions if action.dest == "command")
    choices: Any = found.choices
    return dict(choices)


def unknown(name: str, keywords: list[str]) -> set[str]:
    """Return the keywords that a call does not take."""
    made = inspect.signature(target(name)).parameters
    return set() if any(one.kind is one.VAR_KEYWORD for one in made.values()) else {*keywords} - {*made}


def test_calls_in_messages_exist_with_their_keywords() -> None:
    found = calls()
    assert len(found) > 40
    assert {at: wrong for at, (name, words) in found.items() if (wrong := unknown(name, words))} == {}


def test_options_in_messages_are_fields() -> None:
    found = [(place, *match.groups()) for place, text in texts() for match in FIELD.finditer(text)]
    assert found
    assert [one for one in found if unknown(one[1], [one[2]])] == []


def test_command_lines_in_messages_exist_with_their_options() -> None:
    known, found = subcommands(), command_lines()
    assert len(found) > 20
    wrong = {
        at: (name, options)
        for at, (name, options) in found.items()
        if name not in known or not {*options} <= {*known[name]._option_string_actions}
    }
    assert wrong == {}


@pytest.mark.parametrize(("name", "keyword"), [("reknit.save", "overwrit"), ("LoadOptions", "casts")])
def test_a_keyword_that_a_call_lacks_is_found(name: str, keyword: str) -> None:
    assert unknown(name, [keyword]) == {keyword}
