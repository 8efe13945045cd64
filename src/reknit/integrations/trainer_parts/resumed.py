"""What does a trainer say when it goes on?  One line: the step, its place, and all that was not restored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.engine.call_reports import LoadReport

logger = logging.getLogger("reknit")

_MOST_SAID = 8


def say_resumed(report: LoadReport, num_ranks: int) -> None:
    """Log one line about a load: a warning if anything was not restored as it was saved."""
    found = [f"{name}: {why}" for name, why in (*report.notes.items(), *report.mismatched.items())]
    found += [f"{name}: not in the checkpoint, and left as it was" for name in report.missing]
    found += [] if report.unchecked is None else [report.unchecked]
    if len(found) > _MOST_SAID:
        found[_MOST_SAID:] = [f"{len(found) - _MOST_SAID} more remarks in the report"]
    saved_by = "" if report.saved_by is None else f", saved by {_ranks(report.saved_by)}"
    logger.log(
        logging.WARNING if found else logging.INFO,
        "resumed from %s(%s)%s, loaded by %s%s",
        "" if report.step is None else f"step {report.step} ",
        report.path,
        saved_by,
        _ranks(num_ranks),
        "".join(f"; {each}" for each in found),
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
