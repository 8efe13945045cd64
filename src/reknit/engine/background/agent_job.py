"""Build an agent's save job from the trainer's message."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, NoReturn

from reknit.engine.saving.job import SaveJob
from reknit.errors import AgentError, ReknitError, shortage
from reknit.monitor.phase import Recorder
from reknit.monitor.sinks.jsonl import JsonLinesSink
from reknit.storage.registry import open_storage, register

if TYPE_CHECKING:
    from reknit.comm.base import Group
    from reknit.engine.background import messages as say
    from reknit.monitor.phase import Sink
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage


def agent_job(begin: say.Begin, options: SaveOptions, group: Group) -> SaveJob:
    """Return a save as the agent carries it out, in its own `group`, with the store opened again.

    Raises `ReknitError`.
    """
    try:
        storage = open_store(begin.url, begin.factory, options)
    except ReknitError:
        raise
    except Exception as error:  # whoever made the store decides what it raises
        raise shortage(error) or AgentError(
            f"the agent cannot open {begin.url}: {type(error).__name__}: {error}",
            rank=group.rank,
            remedy="let the module of this store be importable by itself, or save with wait=True",
        ) from error
    step, extra = begin.claims.step, json.loads(begin.extra)
    recorder = Recorder("save", group.rank, step, storage.url, _sinks(options))
    return SaveJob(_collect_nothing, group, storage, options, recorder, step, begin.overwrite, **extra)


def open_store(url: str, factory: str | None, options: SaveOptions) -> Storage:
    """Open a store; `factory` makes those of its scheme, where only the trainer's program registered that."""
    if factory is not None:
        module, _, name = factory.partition(":")
        register(url.partition(":")[0], getattr(importlib.import_module(module), name))
    return open_storage(url, durability=options.durability)


def _collect_nothing() -> NoReturn:
    """Stand for what a trainer collects: its agent gets the copies."""
    raise AssertionError("an agent collects nothing")


def _sinks(options: SaveOptions) -> tuple[Sink, ...]:
    return () if options.events is None else (JsonLinesSink(options.events),)
