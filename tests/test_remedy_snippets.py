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
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "reknit"
CLASSES = {
    name: getattr(reknit, name) for name in ("LoadOptions", "SaveOptions", "CommOptions", "Checkpointer")
}
PREFIX = re.compile(r"\b(reknit\.[a-z_.]+[A-Za-z_]*|LoadOptions|SaveOptions|CommOptions|Checkpointer)\(")
KEYWORD = re.compile(r"(?<![\w.])([a-z_]+)=(?!=)")
FIELD = re.compile(r"\b(LoadOptions|SaveOptions|CommOptions)\.([a-z_]+)")
NAMED = re.compile(r"([A-Za-z_][A-Za-z_.]*)\(")
BARE = re.compile(r"(?<![\w.?&'-])([a-z_][a-z_0-9]*)=(?![=\s>])")
SAVES = "api/saves.py:save runs/checkpointer.py:Checkpointer"
SCRIPT = "integrations/bytecheckpoint/script.py"
TAKERS = {
    "api/checks.py options": "api/saves.py:save api/loads.py:load",
    "api/checks.py path": "api/saves.py:save api/loads.py:load",
    "api/checks.py state": "api/saves.py:save api/loads.py:load",
    "api/checks.py step": "api/saves.py:save",
    "docs/error_catalog.py overwrite": "api/saves.py:save api/stored.py:promote",
    "docs/error_catalog.py wait": SAVES,
    "comm/meeting/address_store.py token": "api/ranks.py:connect",
    "comm/round_errors.py group": f"{SAVES} api/loads.py:load",
    "integrations/bytecheckpoint/script.py framework": f"{SCRIPT}:save {SCRIPT}:load",
    "dataloader/loader.py place": ("dataloader/loader.py:TokenLoader dataloader/torchdata.py:SourceDataset"),
    "dataloader/token_sets.py num_workers": "dataloader/loader.py:TokenLoader",
    "dataloader/torchdata.py snapshot_every_n_steps": ("torchdata.stateful_dataloader.StatefulDataLoader"),
    "engine/background/promotions.py wait": SAVES,
    "engine/background/link.py wait": SAVES,
    "engine/loading/match.py strict": "api/loads.py:load",
    "engine/loading/root.py strict": "api/loads.py:load",
    "engine/stored/at_path.py overwrite": "api/saves.py:save api/stored.py:promote "
    "integrations/deepspeed/script.py:save "
    "integrations/accelerate.py:save_state integrations/formats/import_.py:import_checkpoint "
    "integrations/ray.py:import_on_ray",
    "integrations/formats/open.py weights": "integrations/formats/import_.py:import_checkpoint",
    "engine/stored/heartbeat.py other_run": (
        "runs/checkpointer.py:Checkpointer integrations/lightning/__init__.py:ReknitCheckpoint "
        "integrations/orbax/manager.py:CheckpointManager integrations/orbax/v1_training.py:RunCheckpointer "
        "integrations/torchtitan/script.py:ReknitCheckpointManager.Config"
    ),
    "engine/stored/steps.py pending": "api/stored.py:latest",
    "frameworks/fresh_arrays.py framework": "engine/loading/browse.py:Checkpoint.read",
    "integrations/jax/job.py at": "api/ranks.py:connect",
    "dataloader/sample_order.py shuffle": "torch.utils.data.DataLoader",
    "dataloader/positions.py num_workers": "torch.utils.data.DataLoader",
    "integrations/megatron/flat_states.py items": "api/loads.py:load",
    "integrations/formats/import_.py weights": "integrations/formats/import_.py:import_checkpoint",
    "frameworks/torch/param_options.py use_orig_params": "torch.distributed.fsdp.FullyShardedDataParallel",
    "frameworks/torch/slots.py overlap_with_ddp": "torch.distributed.optim.ZeroRedundancyOptimizer",
    "integrations/deepspeed/script.py load_module_strict": (
        "integrations/deepspeed/script.py:_Calls.load_checkpoint"
    ),
    "integrations/deepspeed/script.py strict": "api/loads.py:load",
    "integrations/megatron/script.py strict": "integrations/megatron/script.py:load",
    "integrations/orbax/checkpointers.py args": "integrations/orbax/checkpointers.py:_Handler.save",
    "integrations/orbax/checkpointers.py force": (
        "integrations/orbax/checkpointers.py:WaitingCheckpointer.save"
    ),
    "integrations/orbax/checkpointers.py overwrite": "integrations/orbax/v1.py:_write",
    "integrations/orbax/items.py strict": "integrations/orbax/checkpointers.py:StandardCheckpointer.restore",
    "integrations/orbax/manager.py args": "integrations/orbax/manager.py:CheckpointManager.save",
    "integrations/dcp/planner.py group": "integrations/dcp/planner.py:DcpReader "
    "integrations/dcp/planner.py:DcpWriter",
    "integrations/dcp/planner.py async_stager": "torch.distributed.checkpoint.async_save",
    "integrations/torchtitan/script.py start": "runs/checkpointer.py:Checkpointer.resume",
    "integrations/lightning/step.py later_steps": ("integrations/lightning/__init__.py:ReknitCheckpoint"),
    "integrations/lightning/step.py resume": "integrations/lightning/__init__.py:ReknitCheckpoint",
    "integrations/trainers.py checkpoints": ("integrations/transformers.py:ReknitTrainerMixin"),
    "integrations/transformers.py resume_from_checkpoint": (
        "integrations/transformers.py:ReknitTrainerMixin.train"
    ),
    "integrations/formats/export.py overwrite": "integrations/hugging_face/export.py:export_hf "
    "integrations/numpy_gguf/export.py:export_npz integrations/torch_save/export.py:export_torch",
    "integrations/hugging_face/export.py verify": "integrations/hugging_face/export.py:export_hf",
    "keywords.py options": "api/saves.py:save api/loads.py:load",
    "monitor/scalars.py run_id": "monitor/scalars.py:MLflow",
    "options/__init__.py bind": "options/__init__.py:CommOptions",
    "options/__init__.py interface": "options/__init__.py:CommOptions",
    "options/__init__.py verify": "options/__init__.py:LoadOptions",
    "options/fields.py wait": SAVES,
    "policies/keep_policies.py keep": "runs/checkpointer.py:Checkpointer",
    "policies/policy.py keep": "runs/checkpointer.py:Checkpointer",
    "policies/policy.py save": "runs/checkpointer.py:Checkpointer",
    "api/ranks.py at": "api/ranks.py:connect",
    "api/ranks.py group": f"{SAVES} api/loads.py:load",
    "runs/tiers.py tiers": "runs/checkpointer.py:Checkpointer",
    "types/entry.py wait": SAVES,
}
"""For each file and keyword of a message without a call: the calls that raise this message."""
NO_CALLS = re.compile(
    r"(cli/maps|cli/show|engine/reports|monitor/page|stores/hdfs/.*)\.py"
    r"|storage/local/os_errors\.py"
    "|frameworks/torch/dtensor.py preserve_rank_order"  # a keyword of torch from 2.15 on
    "|integrations/vescale.py overlap_param_gather"
    "|integrations/lightning/step.py ckpt_path"  # its import takes ten seconds
)
"""Texts of other forms: pages, addresses, axes; and keywords of libraries that need not be there."""
CALLED = {
    "Checkpointer": "runs/checkpointer.py:Checkpointer",
    "LoadOptions": "options/__init__.py:LoadOptions",
    "Tier": "runs/tiers.py:Tier",
    "FaultyStorage": "testing/faulty_storage.py:FaultyStorage",
    "latest": "api/stored.py:latest",
    "load_checkpoint": "integrations/deepspeed/script.py:_Calls.load_checkpoint",
    "PyTreeRestore": "orbax.checkpoint.args.PyTreeRestore",
    "jax.random.wrap_key_data": "jax.random.wrap_key_data",
    "module.to_empty": "torch.nn.Module.to_empty",
    "names": "transforms/__init__.py:names",
    "on_preemption": "policies/save_policies.py:on_preemption",
    "resume": "runs/checkpointer.py:Checkpointer.resume",
    "save": "runs/checkpointer.py:Checkpointer.save",
    "torch.load": "torch.load",
    "train": "integrations/transformers.py:ReknitTrainerMixin.train",
    "DataLoader": "torch.utils.data.DataLoader",
}
"""The calls that messages name without their package."""
OTHERS = {"ArrayRestoreArgs", "ProcessContext"}
COMMAND = re.compile(r"(`?)\breknit ([a-z][a-z-]*)((?: --[a-z-]+| [{}A-Z]+\b| \{\}| [0-9]+)*)")


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return the texts of the source, read once."""
    return tuple(read_texts())


def read_texts() -> Iterator[tuple[str, str]]:
    """Yield the texts of the source without docstrings, with their places; a value in one is `{}`."""
    for path in (*sorted(SOURCE.rglob("*.py")), ROOT / "docs" / "error_catalog.py"):
        tree = ast.parse(path.read_text())
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inside:
                continue
            place = (
                f"{path.relative_to(SOURCE if SOURCE in path.parents else ROOT)}:{getattr(node, 'lineno', 0)}"
            )
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


def test_a_keyword_that_a_call_lacks_is_found() -> None:
    assert unknown("reknit.save", ["overwrit"]) == {"overwrit"}
    assert unknown("LoadOptions", ["casts"]) == {"casts"}


def outside(text: str) -> str:
    """Return a text without the calls that it names."""
    kept, at = "", 0
    for match in NAMED.finditer(text):
        if match.start() >= at:
            kept += text[at : match.start()] + "()"
            at = match.end() + len(whole(text, match.end() - 1))
    return kept + text[at:]


def whole(text: str, start: int) -> str:
    """Return the text behind an opening parenthesis, with the one that closes it."""
    depth = 0
    for at, letter in enumerate(text[start:], start):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return text[start + 1 : at + 1]
    return text[start + 1 :]


@cache
def statements(file: str) -> list[ast.stmt]:
    return ast.parse((SOURCE / file).read_text()).body


def lacking(call: str, words: Iterable[str]) -> set[str]:
    """Return the words that a call lacks as keywords; the set is empty if its package is not installed."""
    try:
        return {*words} - taken(call)
    except pytest.skip.Exception:
        return set()


def taken(call: str) -> set[str]:
    """Return the keywords of a call: ``file:name`` of reknit, which is not imported, or a name elsewhere."""
    file, _, name = call.partition(":")
    if not name:
        module, _, name = call.rpartition(".")
        while True:
            try:
                found: Any = pytest.importorskip(module)
                break
            except pytest.skip.Exception:
                if "." not in module:
                    raise
                module, _, rest = module.rpartition(".")
                name = f"{rest}.{name}"
        for part in name.split("."):
            found = getattr(found, part)
        return {*inspect.signature(found).parameters}
    body = statements(file)
    for part in name.split("."):
        node = next(one for one in body if getattr(one, "name", "") == part)
        assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
        body = node.body
    if isinstance(node, ast.ClassDef):
        made = [one for one in body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if not made:
            return {str(getattr(one.target, "id", "")) for one in body if isinstance(one, ast.AnnAssign)}
        (node,) = made
    assert isinstance(node, ast.FunctionDef)
    return {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


@cache
def bare() -> dict[str, set[str]]:
    """Return the keywords without a call in messages, each with its file, and the places of the messages."""
    found: dict[str, set[str]] = {}
    for place, text in texts():
        for match in BARE.finditer(outside(text)) if " " in text else ():
            key = f"{place.rpartition(':')[0]} {match[1]}"
            if not NO_CALLS.match(key):
                found.setdefault(key, set()).add(place)
    return found


def test_keywords_without_a_call_in_messages_have_calls_that_take_them() -> None:
    assert {key: places for key, places in bare().items() if key not in TAKERS} == {}
    assert TAKERS.keys() - bare().keys() == set()


def test_the_calls_that_raise_a_message_take_the_keyword_in_it() -> None:
    pairs = [(key, call) for key, calls in TAKERS.items() for call in calls.split()]
    assert [(key, call) for key, call in pairs if lacking(call, [key.rpartition(" ")[2]])] == []


def test_calls_without_their_package_in_messages_exist_with_their_keywords() -> None:
    found = {
        f"{place} {match[1]}": (match[1], KEYWORD.findall(arguments(text, match.end() - 1)))
        for place, text in texts()
        if " " in text
        for match in NAMED.finditer(text)
        if not PREFIX.match(text, match.start()) and not match[1].startswith("reknit.")
    }
    known = {at: each for at, each in found.items() if each[1] and each[0] not in OTHERS}
    assert {at for at, (name, _) in known.items() if name not in CALLED} == set()
    assert {at: words for at, (name, words) in known.items() if lacking(CALLED[name], words)} == {}
