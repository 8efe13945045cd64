"""The parameters of each call as a list: name, type, default, unit and meaning.  An extension of Sphinx.

Names, types and defaults come from the signature, and the unit from the last part of the name.  The meaning
is an entry of `MEANINGS` here: for the parameter of one call, or for the name in every call.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import zlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

UNITS = {
    "bytes_per_s": "bytes per second",
    "nbytes": "bytes",
    "s": "seconds",
    "seconds": "seconds",
    "minutes": "minutes",
    "hours": "hours",
    "days": "days",
    "threads": "threads",
}
MEANINGS = {
    "after": "policy of the steps that do not move",
    "after_hours": "age from which on the items are removed",
    "at": "meeting place: a folder, a URL, or a store of torch",
    "bytes_per_s": "upper limit of the copies, all ranks together; None for no limit",
    "cloud": "cloud whose notice of preemption is followed",
    "comm": "how to reach the other ranks",
    "config": "configuration of the model, as its program has it",
    "cool": "cold store to which old steps move",
    "coordinate": "place of this rank in the layout, by axis; in place of `mesh`",
    "count": "number of steps that stay",
    "cuda": "whether the random states of CUDA devices are included",
    "days": "age",
    "devices": "whether the random states of devices are included",
    "dim": "dimension that is cut, joined or resized",
    "dry_run": "only return the steps, and remove nothing",
    "durability": "failure that finished files survive",
    "every": "steps that come to this tier: a number or a policy; None for every saved step",
    "events": "where the records go",
    "expression": "regular expression of the names",
    "file": "file whose appearance is a notice",
    "framework": "the adapter",
    "grace_s": "time between a notice and the end of the process",
    "group": "the ranks of the call; None for all ranks of the job",
    "hours": "time between two saves",
    "idle_s": "longest wait for a new step; None to wait for ever",
    "items": "items of the state; None for all of them",
    "job": "name of the job, where several meet in one place",
    "keep": "policy of the steps that stay; None for all",
    "later_steps": "treatment of steps of an earlier run after the first step of this one",
    "lease_s": "time for which a step is protected without a sign of life",
    "least_gap_s": "least time between two saves",
    "level": "`metadata` reads no tensors; `data` reads and checks every byte",
    "load_options": "options of the loads of the run",
    "mesh": "device mesh that gives each rank its place",
    "metadata": "JSON-like values for the manifest",
    "metric": "name of the metric",
    "metrics": "numbers about the step",
    "minutes": "time between two saves",
    "mode": "whether the lowest or the highest metric is the best",
    "mttf_hours": "mean time between failures of the job; None to measure it",
    "name": "name that records and messages show",
    "nbytes": "bytes that the phase moves",
    "optional": "whether the rule may match no name",
    "options": "options of the call; None for the defaults",
    "order": "new order of the dimensions",
    "other_run": "action in a folder whose owner, another run, still lives",
    "over": "name of the part of a name that is the number in the stack",
    "overhead": "share of the time that saves may take",
    "overwrite": "replace a checkpoint that is there already",
    "parts": "sizes of the parts, or their number; None for equal ones",
    "path": "folder or URL of a checkpoint",
    "pending": "what happens about saves of a dead run that may still commit",
    "poll_s": "pause between two looks",
    "rank": "number of this process, from 0 on",
    "reason": "text that `steps` shows",
    "registry": "registry of the client; None for the default one",
    "rename": "old names, or beginnings of names, with the new ones",
    "repeat": "number of groups along the dimension, each of which is treated alone",
    "replacement": "new name, with groups of the expression",
    "rewrite": "pairs of a regular expression and its replacement",
    "root": "folder or URL that holds the checkpoints of a run",
    "run": "run of the tool",
    "run_id": "run of the tool; None for the active one",
    "save": "policy that decides when to save; None for each call",
    "seconds": "time between two saves",
    "signals": "signals that are notices",
    "since": "number of the step after which to begin",
    "size": "number of processes, or new size of the dimension",
    "source": "name or pattern in the checkpoint",
    "sources": "names or patterns in the checkpoint, in order",
    "state": "items by name: live objects, tensors, values",
    "step": "number of the step",
    "steps": "number of steps",
    "strict": "True: everything must fit; False: restore the part that fits; or patterns of names",
    "target": "name in the state",
    "targets": "names in the state, in order",
    "tiers": "stores of the run, in place of `root`, `save` and `keep`",
    "timeout_s": "longest wait",
    "to": "folder or URL of the copy",
    "token": "secret of at least 16 letters, the same for all; None for the environment variable",
    "total": "number of steps of the whole run",
    "tracer_provider": "provider of the SDK; None for the global one",
    "url": "address of the server",
    "value": "value of this rank",
    "wait": "False: the call returns after the copy to host memory",
    "was": "size before; needed for the inverse",
    "write_id": "attempt that the note is about; None for the one that is there",
    "writer": "writer of the tool",
    "Cool.root": "folder or URL of the cold store",
    "prepare.path": "any place in the store of the saves; nothing is written there",
    "prepare.state": "state of the later saves; None to start the agents alone",
    "sinks.JsonLines.path": "file or folder of the events",
    "sinks.DuckDB.path": "file or folder of the events",
    "transforms.interleave.parts": "number of equal parts",
    "transforms.deinterleave.parts": "number of equal parts",
    "storage.registry.register.factory": "function that opens a URL of the scheme",
    "storage.registry.register.scheme": "the part of a URL before `://`",
    "storage.registry.open_storage.url": "folder or URL",
    "delete.items": "items to remove; None for the whole checkpoint",
    "delete.dry_run": "only return the size, and remove nothing",
    "policies.best.count": "number of steps that stay",
    "policies.at.steps": "numbers of the steps",
    "policies.every.steps": "number of steps between two saves",
    "policies.younger.seconds": "age",
    "policies.younger.minutes": "age",
    "policies.younger.hours": "age",
    "policies.without.items": "items that are removed",
    "transforms.inverted.steps": "rules in the order of the load",
    "transforms.pad.size": "new size of the dimension",
    "transforms.trim.size": "new size of the dimension",
    "connect.size": "number of processes",
    "Checkpointer.options": "options of the saves of the run",
    "watch.name": "name of the reader, so that its lease is renewed after a restart; None for none",
    "phase.step": "step that the phase belongs to",
}


# Their docstrings describe the fields, which mean something else than parameters of the same name.
RECORDS = {"policies.Facts", "policies.Moment", "frameworks.custom.Held", "frameworks.custom.Value"}


def found(name: str) -> Any:
    """Return the object of a dotted name; its first part is a package."""
    first, *parts = name.split(".")
    here: Any = import_module(first)
    for number, part in enumerate(parts, 1):
        here = getattr(here, part, None) or import_module(".".join([first, *parts[:number]]))
    return here


def parameters_of(kind: Any) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes, or nothing where a signature says nothing."""
    try:
        all_of_them = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in all_of_them if each.name not in ("self", "cls", "args", "kwargs")]


def meaning_of(name: str, parameter: str) -> str | None:
    """Return the meaning of a parameter of a call, such as `reknit.save`, or None."""
    call = name.removeprefix("reknit.")
    general = None if call in RECORDS else MEANINGS.get(parameter)
    return MEANINGS.get(f"{call}.{parameter}", general)


def unit_of(parameter: str) -> str | None:
    """Return the unit that a name ends with, or None."""
    ends = (end for end in UNITS if re.search(rf"(^|_){end}$", parameter))
    return next((UNITS[end] for end in ends), None)


def binary(nbytes: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{nbytes / 2**30:g} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:g} MiB"


def default_text(value: object) -> str:
    """Return a default as in the source, without the insides of objects."""
    if value is dataclasses.MISSING or re.search(r"<factory>|^<.* at 0x|^CommOptions\(", repr(value)):
        return "its own defaults"
    return repr(value)


def lines_for(name: str, kind: Any) -> list[str]:
    """Return the list of parameters in reStructuredText, empty for a call without parameters."""
    lines = []
    for each in parameters_of(kind):
        facts = [] if each.annotation is each.empty else [f"``{annotation_text(each.annotation)}``"]
        facts.append(
            "required" if each.default is each.empty else f"default ``{default_text(each.default)}``"
        )
        if each.kind is each.VAR_POSITIONAL:
            facts[-1] = "any number"
        if unit := unit_of(each.name):
            facts.append(f"in {unit}")
        meaning = meaning_of(name, each.name)
        lines.append(f"- ``{each.name}`` ({', '.join(facts)})" + (f": {meaning}" if meaning else ""))
    return [".. rubric:: Parameters", "", *lines, ""] if lines else []


def annotation_text(annotation: object) -> str:
    """Return a type as the source has it, without the modules of names."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text.replace("ForwardRef('", "").replace("')", ""))


class ParameterLists:
    """The handlers of autodoc: short signatures, and a list of parameters below the first paragraph."""

    def __init__(self) -> None:
        self.results: set[str] = set()

    def signature(self, *event: Any) -> tuple[str, str | None] | None:
        """Return a signature without types, which the list has.  Classes that no user makes have none."""
        _, what, name, kind, _, shown, returns = event
        if shown == "()" and parameters_of(kind):
            self.results.add(name)
        if what not in ("function", "method", "class") or shown in (None, "()"):
            return None
        bare = inspect.signature(kind)
        bare = bare.replace(
            parameters=[each.replace(annotation=each.empty) for each in bare.parameters.values()],
            return_annotation=bare.empty,
        )
        text = re.sub(r"^\((?:self|cls)(?:, )?", "(", str(bare)) if what == "method" else str(bare)
        return re.sub(r"<factory>|<[^<>]* at 0x\w+>|<built-in function (\w+)>", r"\1", text) or "()", returns

    def docstring(self, *event: Any) -> None:
        """Put the list below the first paragraph of the docstring."""
        _, what, name, kind, options, lines = event
        is_shown_by_field = dataclasses.is_dataclass(kind) and bool(options.get("members"))
        if what not in ("function", "method", "class") or name in self.results or is_shown_by_field:
            return
        first = lines.index("") if "" in lines else len(lines)
        lines[first:first] = ["", *lines_for(name, kind)]

    def option(self, *event: Any) -> None:
        """Put default and unit below the docstring of a field of options."""
        _, what, name, _, _, lines = event
        owner, _, field = name.rpartition(".")
        if what != "attribute" or not dataclasses.is_dataclass(kind := found(owner)) or owner in self.results:
            return
        for each in dataclasses.fields(kind):
            if each.name == field and each.default is not dataclasses.MISSING:
                unit = unit_of(field)
                large = f" ({binary(each.default)})" if unit == "bytes" and each.default else ""
                lines += ["", f"Default: ``{each.default!r}``" + (f" {unit}{large}." if unit else "."), ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers.  Pages are built anew when this file has changed."""
    lists = ParameterLists()
    app.connect("autodoc-process-signature", lists.signature)
    app.connect("autodoc-process-docstring", lists.docstring)
    app.connect("autodoc-process-docstring", lists.option)
    return {"env_version": zlib.crc32(Path(__file__).read_bytes()), "parallel_read_safe": True}
