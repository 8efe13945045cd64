"""The only door between core and plug-ins: a table of names, whose modules are imported when a name matches.

A plug-in of another distribution declares such rows as entry points, in the groups below.  These are read in
one scan of the process, after no row had the name.  `pyproject.toml` declares the rows of reknit in that
form, too.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import MissingExtraError, UsageError, shortage

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import Distribution, EntryPoint

logger = logging.getLogger("reknit")

ANY = "any"
"""The key of a row that is asked when no other row of its group has the name."""


class Framework(NamedTuple):
    """A row of `reknit.frameworks`: the `module` of adapters for the objects of a library.

    It is asked if `needs` is imported, always without a name.  Without `classes` and `methods`, its adapters
    look at every value.  Else it is imported for the first value that has one of the `classes`
    (``module:name``), or is a dict with exactly these `keys`, or has one of the `methods`.
    """

    module: str
    needs: str = ""
    classes: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    methods: tuple[str, ...] = ()


class Command(NamedTuple):
    """A row of `reknit.commands`: the module of a command, and its line in the help of the program."""

    module: str
    help: str


_MAPPING = "megatron.core.dist_checkpointing.mapping"

STORAGE = {"hdfs": "reknit.stores.hdfs.store:open_with_retries", ANY: "reknit.stores.fsspec_protocols"}
"""For a scheme, the function that opens a URL; for all others, a module that may have one."""
FRAMEWORKS: dict[str, Framework | str] = {
    "deepspeed": Framework("reknit.integrations.deepspeed.zero", "deepspeed"),
    "vescale": Framework(
        "reknit.integrations.vescale",
        "vescale",
        (
            "vescale.optim.base_optimizer:BasicOptimizer",
            "vescale.optim.distributed_optimizer:DistributedOptimizer",
        ),
    ),
    "megatron": Framework(
        "reknit.integrations.megatron.state",
        "megatron.core",
        (
            "megatron.core.transformer.module:MegatronModule",
            "megatron.core.optimizer.optimizer:MegatronOptimizer",
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker",
            f"{_MAPPING}:ShardedTensor",
            f"{_MAPPING}:ShardedTensorFactory",
            f"{_MAPPING}:ShardedObject",
            f"{_MAPPING}:LocalNonpersistentObject",
            "reknit.integrations.megatron.model:FlatLeaves",
        ),
    ),
    "torch": Framework("reknit.frameworks.torch.tensor", "torch"),
    "torch-signatures": Framework("reknit.frameworks.torch.signature", "torch"),
    "torch-modules": Framework("reknit.frameworks.torch.modules", "torch", ("torch.nn:Module",)),
    "torch-optimizers": Framework(
        "reknit.frameworks.torch.optimizers",
        "torch",
        ("torch.optim:Optimizer",),
        keys=frozenset({"state", "param_groups"}),
    ),
    "torch-numbers": "reknit.frameworks.torch.numbers",
    "jax": Framework("reknit.integrations.jax.arrays", "jax"),
    "jax-values": "reknit.integrations.jax.filling",
    "torchdata": "reknit.dataloader.positions",
    "loaders": Framework("reknit.dataloader.state", methods=("replicated_state", "stream_state")),
}
"""Adapters for objects, in the order of use; the others are modules that are asked for by name."""
JOBS = {
    "jax": "reknit.integrations.jax.job:current_job",
    "jax://": "reknit.integrations.jax.job:coordination_store",
}
"""For an imported library, the job of this process; for the scheme of a meeting place, its store."""
FORMATS = {
    ANY: "reknit.integrations.formats.programs",
    "any-read": "reknit.integrations.formats.open",
    "any-verify": "reknit.integrations.formats.verify:verify_foreign",
    "any-rules": "reknit.integrations.hugging_face.conversion:rules_for",
    "ByteCheckpoint": "reknit.integrations.bytecheckpoint.folder:read_folder",
    "DCP": "reknit.integrations.dcp.folder:read_folder",
    "DeepSpeed": "reknit.integrations.deepspeed.folder:read_folder",
    "Orbax": "reknit.integrations.orbax.folder:read_folder",
    "Megatron": "reknit.integrations.megatron.folder:read_folder",
    "Hugging-Face": "reknit.integrations.hugging_face.safetensors:read_folder",
    "PEFT": "reknit.integrations.hugging_face.safetensors:read_adapter",
    "torch.save-file": "reknit.integrations.torch_save.files:add_file",
    "Lightning-file": "reknit.integrations.torch_save.files:add_file",
    "safetensors-file": "reknit.integrations.hugging_face.safetensors:add_safetensors",
    "Hugging-Face-file": "reknit.integrations.hugging_face.safetensors:add_index",
    "GGUF-file": "reknit.integrations.numpy_gguf.files:add_gguf",
    "npz-file": "reknit.integrations.numpy_gguf.files:add_npz",
    "npy-file": "reknit.integrations.numpy_gguf.files:add_npy",
}
"""The readers of other programs' checkpoints.

Where there is no manifest, the first row recognises the format, the second one opens it with its reader, and
the third one checks it.  The fourth one has the rules that a target of a load needs for files of a program.
"""
COMMANDS = {
    "ls": Command("reknit.cli.ls", "list the checkpoints in a folder"),
    "latest": Command("reknit.cli.ls", "print the path of the newest checkpoint"),
    "show": Command("reknit.cli.show", "show the content of a checkpoint"),
    "verify": Command("reknit.cli.verify", "check a checkpoint without loading it"),
    "diff": Command("reknit.cli.diff", "compare two checkpoints, of reknit or of other programs"),
    "report": Command("reknit.cli.report", "show the times of all phases on all ranks, from events"),
    "trace": Command("reknit.cli.report", "write a trace of all ranks for Perfetto or Chrome, from events"),
    "dash": Command("reknit.cli.dash", "serve the report to a browser, and keep it up to date"),
    "advise": Command("reknit.cli.advise", "compute the best time between saves"),
    "import": Command("reknit.cli.imports", "make a checkpoint of one that another program saved"),
    "export": Command("reknit.cli.export", "write a checkpoint in another format"),
    "promote": Command("reknit.cli.promote", "copy a checkpoint to a durable store"),
    "rm": Command("reknit.cli.rm", "remove checkpoints"),
    "pin": Command("reknit.cli.rm", "keep checkpoints from being removed"),
    "unpin": Command("reknit.cli.rm", "let pinned checkpoints be removed again"),
    "prune": Command("reknit.cli.prune", "remove old steps of a run"),
    "gc": Command("reknit.cli.gc", "list and delete the leftovers of killed saves"),
    "agents": Command(
        "reknit.cli.agents", "list the processes that still write checkpoints, or wait for them"
    ),
    "certify-storage": Command("reknit.cli.certify", "check that a store supports all that checkpoints need"),
}
"""Commands of the program, in the order of its help."""
ROWS: dict[str, Any] = {
    "reknit.storage": STORAGE,
    "reknit.frameworks": FRAMEWORKS,
    "reknit.jobs": JOBS,
    "reknit.formats": FORMATS,
    "reknit.commands": COMMANDS,
}

_EXTRAS = {
    "hdfs_native": ("hdfs-native", "hdfs"),
    "jax": ("jax", "jax"),
    "torch": ("torch", "torch"),
    "rich": ("rich", "cli"),
    "pytest": ("pytest", "testing"),
}
"""Packages that a row may miss: the name of each for pip, and the extra of reknit that has it."""


def find(group: str, key: str, what: str = "") -> Any:
    """Return the value of a row, or of an entry point where no row has the key; None without either.

    `what` needs it, for errors.  Raises `MissingExtraError` for a row whose extra is not installed, and
    `UsageError` for an entry point that cannot be loaded, with the name of its distribution.
    """
    if (row := ROWS[group].get(key)) is not None:
        return value_of(row if isinstance(row, str) else row.module, what or key)
    entry = installed(group).get(key)
    return None if entry is None else loaded(entry)


def value_of(place: str, what: str) -> Any:
    """Return the value at a place ``module:attribute``, or a module; see `find`."""
    module, _, name = place.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        package, extra = _EXTRAS.get((error.name or "").partition(".")[0], ("", ""))
        if not package:
            raise
        raise MissingExtraError(
            f"{what} needs the package {package}", remedy=f"pip install 'reknit[{extra}]'"
        ) from error
    return getattr(found, name) if name else found


def present(group: str) -> list[tuple[str, Any]]:
    """Return the key and value of the rows of reknit whose key is the name of an imported module."""
    # None blocks the import of a module
    return [(key, find(group, key)) for key in ROWS[group] if sys.modules.get(key) is not None]


def exported(interface: str) -> Callable[[str], Any]:
    """Return the function `__getattr__` of an interface: it imports a name of its stub when it is used."""
    spec: Any = sys.modules[interface].__spec__
    homes = {
        alias.name: str(statement.module)
        for statement in ast.parse(spec.loader.get_data(f"{spec.origin}i")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def named(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {interface!r} has no attribute {name!r}", name=name)
        # the list has it import a module of that name, too
        found = getattr(__import__(homes[name], fromlist=[name]), name)
        setattr(sys.modules[interface], name, found)
        return found

    return named


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of other distributions in a group, by name."""
    return _scan(tuple(sys.path)).get(group, {})


@lru_cache(maxsize=1)  # the path of a process hardly ever changes
def _scan(path: tuple[str, ...]) -> dict[str, dict[str, EntryPoint]]:
    """Read the entry points of all distributions; the first one has a name, and the log names others."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in [entry for one in _declaring(path) for entry in one.entry_points]:
        if entry.group not in ROWS:
            continue
        first = found.setdefault(entry.group, {})
        if entry.name in ROWS[entry.group]:
            logger.error("%s, which is a name of reknit, and is ignored", shown_entry(entry))
        elif first.setdefault(entry.name, entry).value != entry.value or _owner(first[entry.name]) != _owner(
            entry
        ):
            logger.error(
                "%s, as %s does, which is used", shown_entry(entry), distribution_of(first[entry.name])
            )
    return found


def _declaring(path: tuple[str, ...]) -> list[Distribution]:
    """Return the distributions that declare rows, but for reknit.

    An environment has hundreds, and an object of `importlib.metadata` for each takes most of the time.
    """
    from importlib.metadata import Distribution, distributions  # its parser of mails has a long import

    found, archives = list[Distribution](), list[str]()
    for place in path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            archives.append(place)
            continue
        for name in names:
            if name.lower().endswith(("dist-info", "egg-info")) and not name.startswith("reknit-"):
                with suppress(OSError), open(os.path.join(place, name, "entry_points.txt"), "rb") as file:
                    if b"[reknit." in file.read():
                        found.append(Distribution.at(os.path.join(place, name)))
    for one in distributions(path=archives):  # those of other finders are among them
        if "[reknit." in (one.read_text("entry_points.txt") or "") and one.name != "reknit":
            found.append(one)
    return found


def loaded(entry: EntryPoint) -> Any:
    """Return the value of an entry point.  Raises `UsageError` with the name of its distribution."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # the code of a package may raise any error when it is imported
        kind = MissingExtraError if isinstance(error, ImportError) else UsageError
        raise shortage(error) or kind(
            f"{shown_entry(entry)}, which cannot be loaded: {type(error).__name__}: {error}",
            remedy=remedy_for(entry),
        ) from error


def shown_entry(entry: EntryPoint) -> str:
    """Return an entry point as the subject of an error."""
    return f"{distribution_of(entry)} brings {entry.name!r} ({entry.value}) to {entry.group}"


def summary_of(entry: EntryPoint) -> str:
    """Return the sentence about the distribution of an entry point."""
    return "" if entry.dist is None else str(entry.dist.metadata["Summary"] or "")


def remedy_for(entry: EntryPoint) -> str:
    """Return the remedy for a wrong entry point."""
    return f"correct or uninstall {distribution_of(entry).removeprefix('the distribution ')}"


def distribution_of(entry: EntryPoint) -> str:
    """Return the distribution of an entry point, for messages."""
    return f"the distribution {name}" if (name := _owner(entry)) else "a distribution"


def _owner(entry: EntryPoint) -> str:
    try:
        return "" if entry.dist is None else str(entry.dist.name)
    except Exception:  # of metadata without a name
        return ""
