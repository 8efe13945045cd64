from __future__ import annotations

import importlib
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

import reknit
from reknit.cli import main as cli
from tests.running.examples import at_night

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def part(name: str) -> Any:
    """Import a module of the demo as its scripts do: from their folder."""
    sys.path.insert(0, str(DEMO))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DEMO))


source_text, tiny_llama = part("source_text"), part("tiny_llama")
fingerprint, parts, run = part("fingerprint").fingerprint, part("parts"), part("run")

TEXT = torch.arange(5000).remainder(251).to(torch.uint8)


def batches(part: int = 0, num_parts: int = 1, seed: int = 3) -> Any:
    return source_text.Batches(TEXT, num_rows=12, length=9, seed=seed, part=part, num_parts=num_parts)


# the model


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama.TinyLlama(tiny_llama.Config(), dropout=0.5).eval()


def test_transformers_computes_the_same_logits_and_loss(model: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama.Config().hugging_face()))
    loader: Any = transformers.AutoModelForCausalLM
    theirs = loader.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    theirs.load_state_dict(model.state_dict(), strict=True)
    rows = batches().__next__()
    with torch.no_grad():
        torch.testing.assert_close(theirs(rows).logits, model(rows), rtol=0, atol=1e-5)
        loss = theirs(rows, labels=rows).loss
        torch.testing.assert_close(loss, tiny_llama.loss_of(model, rows), rtol=0, atol=1e-5)


# the fingerprint


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_every_part_of_the_state_changes_the_fingerprint(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    loader = batches()
    tiny_llama.loss_of(model, next(loader)).backward()
    optimizer.step()
    scheduler.step()
    seen = [fingerprint(model, optimizer, scheduler, loader)]
    assert fingerprint(model, optimizer, scheduler, loader) == seen[0]

    def changed() -> bool:
        seen.append(fingerprint(model, optimizer, scheduler, loader))
        return len(set(seen)) == len(seen)

    weight = model.model.layers[1].mlp.up_proj.weight
    weight.detach().view(torch.int32)[3, 4] ^= 1
    assert changed()
    optimizer.state[weight]["exp_avg_sq"].view(torch.int32)[3, 4] ^= 1
    assert changed()
    scheduler.last_epoch += 1
    assert changed()
    next(loader)
    assert changed()
    torch.rand(1)
    assert changed()


# the table and the exit status


def test_the_exit_status_tells_whether_all_is_true_and_the_logs_of_a_part_that_is_not_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, ok: bool, demo: Any) -> None:
        (tmp_path / f"{name}-0.txt").write_text(f"last words of {name}\n")
        demo.job(name, "train.py", world=1)
        demo.check(name, "yes", "yes or no", ok)

    right, wrong = partial(part, "right", True), partial(part, "wrong", False)
    monkeypatch.setattr(run, "PARTS", {"a": right})
    assert run.run(tmp_path) == 0
    capsys.readouterr()
    monkeypatch.setattr(run, "PARTS", {"a": wrong, "b": right})
    assert run.run(tmp_path) == 1
    out, err = capsys.readouterr()
    assert err == "wrong, rank 0:\n    last words of wrong\n"
    assert "1 of 2 are not true" in out


def test_the_checkpoint_is_kept_and_the_commands_that_are_shown_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept" / "demo")
    monkeypatch.chdir(tmp_path)
    for weight in (1.0, 2.0):  # the second run takes the place of the first
        step = tmp_path / "work" / "moved" / "step_00000024"
        reknit.save(step, {"model": {"weight": torch.full((2,), weight)}}, step=24)
        text = run.ending(run.keep(run.last_checkpoint(tmp_path / "work")))
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) == 3
    for command in commands:
        assert cli.main(command[1:]) == 0, command
    capsys.readouterr()
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["weight"], torch.full((2,), 2.0))


@at_night("a rank is lost in tests/examples/test_restart.py by day")
@pytest.mark.timeout(600)
def test_all_is_true_also_where_agents_are_slow(tmp_path: Path) -> None:
    every, slow = tmp_path / "all", tmp_path / "slow"
    every.mkdir()
    (slow / "run").mkdir(parents=True)
    assert run.run(every) == 0
    demo = parts.Demo(slow)
    (slow / "run" / "delay").write_text("1.0")  # longer than the steps until a rank is lost
    demo.lost_rank()
    assert [check for check in demo.checks if not check.ok] == []
