"""Parse a command line; for a wrong one, suggest the nearest command, option or choice."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from reknit.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors suggest the nearest name; the parsers of commands have this class too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: list[str] = []

    def parse_known_args(  # type: ignore[override]  # one signature in place of two overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and exit with an error and the usage of this parser for unknown arguments."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(self._given, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage, the error, and the option that was probably meant; exit with 2."""
        remedy = self._meant() or f"{self.prog} --help lists its options"
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n  -> {remedy}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        # The method of argparse ignores a full disk.
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if question := did_you_mean(str(value), map(str, action.choices or ())):
                self.print_usage(sys.stderr)
                self.exit(2, f"{self.prog}: {error}\n  -> {question}\n")
            raise

    def _meant(self) -> str | None:
        """Return a question with the nearest option in place of an unknown one, or None."""
        for text in self._given:
            name = text.partition("=")[0]
            if name == "--":
                break
            if name.startswith("--") and not any(known.startswith(name) for known in self._options()):
                return did_you_mean(name, self._options())
        return None

    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]
