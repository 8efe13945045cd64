"""The error of a wrong command line names the probable one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest

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


@pytest.mark.parametrize("words", [words for words in COMMANDS if words])
def test_a_misspelt_command_is_answered_with_the_right_one(command: Command, words: tuple[str, ...]) -> None:
    *before, last = words
    ran = command(*before, last + "x")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(f"\n  -> did you mean {last!r}?\n")
    assert f"invalid choice: '{last}x'" in ran.err


@pytest.mark.parametrize(
    ("words", "option"), OPTIONS, ids=[" ".join((*words, option)) for words, option in OPTIONS]
)
def test_a_misspelt_option_is_answered_with_the_right_one(
    command: Command, words: tuple[str, ...], option: str
) -> None:
    wrong = misspelt(option)
    ran = command(*words, f"{wrong}=1")
    assert (ran.code, ran.out) == (2, "")
    assert f"did you mean {option!r}?" in ran.err
    assert f"usage: {COMMANDS[words].prog} " in ran.err


def test_a_misspelt_choice_is_answered_with_the_right_one(command: Command) -> None:
    ran = command("export", "hf", "a", "b", "--dtype", "bfloat61")
    assert ran.code == 2
    assert ran.err.endswith("\n  -> did you mean 'bfloat16'?\n")


@pytest.mark.parametrize(
    "arguments", [("ls", "a", "b"), ("ls", "a", "--qqqqqqqqqqqqq"), ("ls",), ("ls", "a", "--", "--jsn")]
)
def test_what_resembles_nothing_is_answered_with_the_help(
    command: Command, arguments: tuple[str, ...]
) -> None:
    ran = command(*arguments)
    assert ran.code == 2
    assert ran.err.endswith("\n  -> reknit ls --help lists its options\n")


@pytest.mark.parametrize("wrong", ["0", "-1", "x", "1.5", "", "9" * 19, "9" * 5_000])
def test_what_is_no_count_is_refused_with_the_name_of_the_option(command: Command, wrong: str) -> None:
    ran = command("prune", "runs", f"--keep-last={wrong}")
    assert (ran.code, ran.out) == (2, "")
    assert f"argument --keep-last: {shown(wrong)} is not a whole number from 1 on\n" in ran.err


def test_what_is_no_port_is_refused_with_those_that_are(command: Command) -> None:
    ran = command("dash", "events", "--port=70000")
    assert ran.code == 2
    assert "argument --port: '70000' is not a whole number from 0 to 65535\n" in ran.err


@pytest.mark.parametrize("wrong", ["0", "-1", "x", "nan", "inf", "1e10", "9" * 5_000])
def test_what_is_no_amount_is_refused_with_the_name_of_the_option(command: Command, wrong: str) -> None:
    ran = command("report", "events", f"--mttf={wrong}")
    assert (ran.code, ran.out) == (2, "")
    assert f"argument --mttf: {shown(wrong)} is not a number from 1e-06 to 1e+09\n" in ran.err
