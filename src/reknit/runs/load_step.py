"""Load one step of a run from the fastest tier; the other tiers replace damaged files."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reknit.api import loads
from reknit.errors import CheckpointNotFoundError, DroppedError, FormatError, VersionError
from reknit.locations import location_text
from reknit.options import LoadOptions
from reknit.runs.tiers import below

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.engine.call_reports import LoadReport
    from reknit.ranks import AnyGroup
    from reknit.runs.tiers import FoundStep, Level

UNSOUND = (FormatError, CheckpointNotFoundError, DroppedError)
"""Errors of a step that another step may replace; a `VersionError` is an exception."""


def load_step(
    levels: Sequence[Level],
    found: FoundStep,
    state: Mapping[str, Any],
    *,
    options: Any,
    group: AnyGroup | None,
    say: Callable[..., None],
) -> LoadReport:
    """Load a step from the fastest tier with the others as replicas; if that fails, from the next tier.

    That may help, since the tiers may hold different saves of a step, and only one may lack dropped items.
    """
    places = [below(levels[tier].url, found.name) for tier in found.tiers]
    if isinstance(options, LoadOptions):
        places += [below(location_text(replica), found.name) for replica in options.replicas]
    elif options is not None:  # the load raises the error
        return loads.load(places[0], state, options=options, group=group)
    for at in range(1, len(found.tiers) + 1):
        here = replace(options or LoadOptions(), replicas=tuple(places[at:]))
        try:
            return loads.load(places[at - 1], state, options=here, group=group)
        except VersionError:
            raise
        except UNSOUND as error:
            if at == len(found.tiers):
                raise
            say(logging.WARNING, "%s cannot be loaded: %s", places[at - 1], error.message)
    raise AssertionError("a step is in some tier")
