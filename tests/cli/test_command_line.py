"""The error of a wrong command line names the probable one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from reknit.cli.main import parser
from reknit.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.command import Command


def commands(
    of: argparse.ArgumentParser, *names: str
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield the words of every command, those inside others too, and its parser."""
    yield names, of
    for action in of._get_positional_actions():
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from commands(inner, *names, name)


COMMANDS = dict(commands(parser()))
OPTIONS = [
    (words, option)
    for words, of in COMMANDS.items()
    for option in of._option_string_actions
    if option.startswith("--") and option != "--help"
]


def misspelt(name: str) -> str:
    """Return a name without one of its letters."""
    middle = len(name) // 2
    return name[:middle] + name[middle + 1 :]


def test_a_misspelt_command_is_answered_with_the_right_one(command: Command) -> None:
    for *before, last in filter(None, COMMANDS):
        ran = command(*before, last + "x")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.endswith(f"\n  -> did you mean {last!r}?\n")
        assert f"invalid choice: '{last}x'" in ran.err


def test_a_misspelt_option_is_answered_with_the_right_one(command: Command) -> None:
    for words, option in OPTIONS:
        ran = command(*words, f"{misspelt(option)}=1")
        assert (ran.code, ran.out) == (2, ""), (words, option)
        assert f"did you mean {option!r}?" in ran.err, words
        assert f"usage: {COMMANDS[words].prog} " in ran.err, option


def test_a_misspelt_choice_is_answered_with_the_right_one(command: Command) -> None:
    ran = command("export", "hf", "a", "b", "--dtype", "bfloat61")
    assert ran.code == 2
    assert ran.err.endswith("\n  -> did you mean 'bfloat16'?\n")


def test_what_resembles_nothing_is_answered_with_the_help(command: Command) -> None:
    for arguments in (("ls", "a", "b"), ("ls", "a", "--qqqqqqqqqqqqq"), ("ls",), ("ls", "a", "--", "--jsn")):
        ran = command(*arguments)
        assert (ran.code, ran.out) == (2, ""), arguments
        assert "usage: reknit" in ran.err
        assert ran.err.endswith("\n  -> reknit ls --help lists its options\n"), arguments


def test_what_is_no_such_number_is_refused_with_the_name_of_the_option(command: Command) -> None:
    counts = ("0", "-1", "x", "1.5", "", "9" * 19, "9" * 5_000)
    amounts = ("0", "-1", "x", "nan", "inf", "1e10", "9" * 5_000)
    for arguments, option, wrong, needed in (
        *(("prune runs", "--keep-last", wrong, "a whole number from 1 on") for wrong in counts),
        *(("report events", "--mttf", wrong, "a number from 1e-06 to 1e+09") for wrong in amounts),
        ("dash events", "--port", "70000", "a whole number from 0 to 65535"),
    ):
        ran = command(*arguments.split(), f"{option}={wrong}")
        assert (ran.code, ran.out) == (2, "")
        assert f"argument {option}: {shown(wrong)} is not {needed}\n" in ran.err
