"""How does a report look at a prompt, in a notebook, and in the log?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from reknit.errors import without_secrets
from reknit.monitor.progress_text import amount

if TYPE_CHECKING:
    from collections.abc import Collection

_SHOWN = 3
"""Names that are shown of many."""
_MOST, _LAST = 160, 100
"""Characters that are shown of a fact, and how many of them are its last: paths differ at their ends."""


class Shown(ABC):
    """An object with a few facts to show; its full content may be long."""

    __slots__ = ()

    @abstractmethod
    def _facts(self) -> dict[str, object]:
        """Return the facts to be shown, by their names; None is left out."""

    def __repr__(self) -> str:
        try:
            facts = [f"{name}: {_line(fact)}" for name, fact in self._facts().items() if fact is not None]
        except Exception:  # a debugger shows objects that are half made, and errors whose text cannot be made
            return f"<{type(self).__name__}>"
        return f"<{type(self).__name__} {', '.join(facts)}>"

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        from html import escape

        rows = "".join(
            f"<tr><th style='text-align: left'>{escape(name)}</th>"
            f"<td style='text-align: left'>{escape(without_secrets(str(fact)))}</td></tr>"
            for name, fact in self._facts().items()
            if fact is not None
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _line(fact: object) -> str:
    """Return a fact as one line without its middle, where it is long."""
    text = without_secrets(" ".join(str(fact).splitlines()))
    return text if len(text) <= _MOST else f"{text[: _MOST - _LAST]}...{text[-_LAST:]}"


def some(names: Collection[str]) -> str | None:
    """Return the number of names, and the first of them; None without names."""
    if not names:
        return None
    first = ", ".join([name for name, _ in zip(names, range(_SHOWN), strict=False)])
    return f"{len(names)} ({first}{', ...' if len(names) > _SHOWN else ''})"


def logged(done: str, path: str, step: int | None, nbytes: int, by: str, *, seconds: float) -> str:
    """Return the line that the log has of a save or a load that went well."""
    of = "" if step is None else f" (step {step})"
    rate = f", {amount(nbytes / seconds)}/s" if seconds > 0 else ""
    return f"{done} {path}{of}: {amount(nbytes)}{by and ' '}{by} in {seconds:.3g} s{rate}"


def ranks(size: int) -> str:
    """Return a number of ranks in words."""
    return f"{size} rank{'' if size == 1 else 's'}"
