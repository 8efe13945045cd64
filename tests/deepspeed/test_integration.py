"""One call saves a whole DeepSpeed engine, and one restores it: values, counters, and the user's own."""

from __future__ import annotations

import ast
import re
import signal
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import MismatchError, StateError, UsageError
from reknit.integrations import deepspeed as integration
from reknit.integrations.deepspeed import private
from reknit.runs import load_step
from tests import ranks
from tests.deepspeed import engines
from tests.integrations.random_death import death
from tests.optional import needs
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("deepspeed", "DeepSpeed")

run = partial(ranks.run, warm="deepspeed")

SAVE = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)
CLIENT = {"epoch": 3, "nested": {"best": [0.5, 0.25]}, "noise": torch.arange(5.0)}


def counters(engine: Any) -> dict[str, Any]:
    return private.progress(engine)["counters"]


def go_on(root: str) -> dict[str, Any]:
    """Save an engine, load it into others, and return the observations."""
    engine = engines.build("z2-bf16", steps=3)
    average = torch.full((3,), 2.5)
    pending = integration.save(
        engine, f"{root}/a", client_state=CLIENT, items={"average": average}, options=SAVE
    )
    seen: dict[str, Any] = {"report": pending.result().step, "counters": [counters(engine)]}
    expected = [engines.train_step(engine, 3), engines.train_step(engine, 4)]
    again = engines.build("z2-bf16", steps=0, seed=7)
    other = torch.zeros(3)
    seen["loaded"] = integration.load(again, f"{root}/a", items={"average": other})
    seen["average"] = other
    seen["counters"].append(counters(again))
    seen["losses"] = (expected, [engines.train_step(again, 3), engines.train_step(again, 4)])
    seen["rates"] = [one.optimizer.param_groups[0]["lr"] for one in (engine, again)]
    resharded = engines.build("z3-bf16", steps=0, seed=7)
    integration.load(resharded, f"{root}/a", items={"average": other}, load_lr_scheduler_states=False)
    seen["counters"].append(counters(resharded))
    alone = engines.build("z1-bf16", steps=1, seed=7)
    before = counters(alone)
    seen["alone"] = integration.load(alone, f"{root}/a", load_module_only=True), before == counters(alone)
    seen["first losses"] = [engines.train_step(one, 3) for one in (resharded, alone)]
    without = engines.build("z1-bf16", steps=1, seed=7)
    states = [dict(s) for s in without.optimizer.state.values()]
    integration.load(without, f"{root}/a", items={"average": other}, load_optimizer_states=False)
    kept = zip(states, without.optimizer.state.values(), strict=True)
    seen["states kept"] = all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in kept)
    seen["not trained"] = [_without_an_optimizer(f"{root}/not trained", stage) for stage in (0, 3)]
    dist.barrier()
    return seen


def _without_an_optimizer(path: str, stage: int) -> bool:
    """Save and load engines that only evaluate; return whether the second has the weights of the first."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        how = engines.config(stage, "fp32")
        made.append(engines.deepspeed().initialize(model=torch.nn.Linear(5, 3), config=how)[0])
    integration.save(made[0], f"{path}-{stage}", options=SAVE)
    integration.load(made[1], f"{path}-{stage}")
    one, other = ([engines.whole(p) for p in engine.module.parameters()] for engine in made)
    return all(map(torch.equal, one, other))


def test_one_call_restores_all_or_a_part_of_an_engine_bit_for_bit(tmp_path: Path) -> None:
    found = run(2, go_on, str(tmp_path))[0]
    assert found["report"] == 3, "the step is the engine's own where none is given"
    expected, losses = found["losses"]
    assert losses == expected
    assert found["rates"][0] == found["rates"][1]
    first, *others = found["counters"]
    assert first["global_steps"] == first["micro_steps"] == 3
    assert others == [first, first], "whatever the stage"
    path, client = found["loaded"]
    assert path.endswith("/a")
    assert torch.equal(client.pop("noise"), CLIENT["noise"])  # type: ignore[arg-type]
    assert client == {"epoch": 3, "nested": {"best": [0.5, 0.25]}}
    assert torch.equal(found["average"], torch.full((3,), 2.5))
    assert found["states kept"], "the optimizer can be left as it is"
    assert found["not trained"] == [True, True], "an engine may have no optimizer"
    (_, client), same_counters = found["alone"]
    assert client == {}
    assert same_counters
    resharded, alone = found["first losses"]
    # Not that of the first engine: with ZeRO-3, DeepSpeed changes the rounding of torch in linear maps.
    assert alone == resharded
    assert alone == pytest.approx(expected[0], rel=1e-3)


def test_only_checkpoints_of_deepspeed_stop_a_script_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "is_engine", lambda _: True)
    (tmp_path / "base").mkdir()
    torch.save({"weight": torch.zeros(2)}, tmp_path / "base/model.pt")
    torch.save({"ids": torch.zeros(2)}, tmp_path / "dataset.pt")
    engine = SimpleNamespace()
    integration.take_over(engine)
    assert engine.load_checkpoint(str(tmp_path)) == (None, {})
    (tmp_path / "global_step9").mkdir()
    torch.save({"weight": torch.zeros(2)}, tmp_path / "global_step9/mp_rank_00_model_states.pt")
    with pytest.raises(UsageError, match="global_step9") as refused:
        engine.load_checkpoint(str(tmp_path))
    assert "before take_over" in str(refused.value.remedy)


def train_as_before(root: str, layout: str, last: int, seed: int | None) -> tuple[list[float], str | None]:
    """Train with the calls of DeepSpeed, which reknit has taken over, from the newest checkpoint on."""
    reached = death(seed, 4, 6) if seed is not None and dist.get_rank() == 1 else lambda _: None
    engine = engines.build(layout, steps=0)
    integration.take_over(engine, wait=False, options=SAVE)
    path, client = engine.load_checkpoint(root)
    assert (path is None) == (client == {})
    losses = []
    for step in range(engine.global_steps, last):
        losses.append(engines.train_step(engine, step))
        assert engine.save_checkpoint(root, client_state={"epoch": step})
        reached(step)
    return losses, path


def follow_remedies(root: str) -> list[str]:
    """Follow the remedies of errors of the calls of DeepSpeed, and return them."""
    engine = engines.build("z1-fp32")
    integration.take_over(engine, items={"average": torch.ones(2)}, options=SAVE)
    engine.offload_states()
    with pytest.raises(StateError, match="has offloaded its states") as offloaded:
        engine.save_checkpoint(root)
    (call,) = re.findall(r"call engine\.(\w+)\(\)", str(offloaded.value.remedy))
    getattr(engine, call)()
    engine.save_checkpoint(root)
    other = engines.build("z1-fp32", seed=7)
    integration.take_over(other, items={"average": torch.zeros(3)}, options=SAVE)
    with pytest.raises(MismatchError, match="average") as misfit:
        other.load_checkpoint(root)
    snippets = re.findall(r"load_module_strict=(False|\[[^\]]*\])", str(misfit.value.remedy))
    assert len(snippets) == 2
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_step.logger, "log", lambda level, text, *parts: lines.append(text % parts))
        for snippet in snippets:
            strict = ast.literal_eval(snippet.replace("model/head.*", "average*"))
            assert other.load_checkpoint(root, load_module_strict=strict)[0] is not None
    assert len(lines) == (0 if dist.get_rank() else 2), "rank 0 alone logs a line about a load"
    for line in lines:
        assert line.startswith(f"resumed from {root}/global_step"), line
        assert "saved by 2 ranks, loaded by 2 ranks)" in line, line
        assert "average" in line, line
    with pytest.raises(UsageError, match="leave exclude_frozen_parameters out"):
        engine.save_checkpoint(root, exclude_frozen_parameters=True)
    return [str(one.value.remedy) for one in (offloaded, misfit)]


def test_what_an_error_of_the_calls_of_deepspeed_says_can_be_done(tmp_path: Path) -> None:
    for remedies in run(2, follow_remedies, str(tmp_path / "run")):
        assert not any(" strict=" in remedy for remedy in remedies)


def until_one_dies(root: str, seed: int) -> None:
    with pytest.raises(RuntimeError, match="Connection"):
        train_as_before(root, "z2-fp32", 400, seed)


def test_a_script_that_keeps_its_calls_resumes_after_a_death_in_another_stage_on_fewer_ranks(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "run")
    unfinished = tmp_path / "run" / "global_step99"
    unfinished.mkdir(parents=True)
    (unfinished / "0123456789abcdef.0.0.bin").write_bytes(b"unfinished")
    assert run(2, until_one_dies, root, 1, some_die=True)[1] == ranks.Died(-signal.SIGKILL)
    newest = reknit.latest(root, pending="wait")
    ((_, path),) = run(1, train_as_before, root, "z3-fp32", 12, None)
    assert path == newest
    assert path is not None
    assert path.startswith(f"{root}/global_step")
    assert reknit.latest(root, pending="wait") == f"{root}/global_step12"


@at_night("test_engines.py and the test above go on from a load by day")
def test_a_resumed_script_has_the_losses_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    died, whole = str(tmp_path / "died"), str(tmp_path / "whole")
    first = run(2, train_as_before, died, "z1-bf16", 4, None)
    second = run(2, train_as_before, died, "z1-bf16", 7, None)
    at_once = run(2, train_as_before, whole, "z1-bf16", 7, None)
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == at_once[rank][0]
    assert first[0][1] is None
    assert second[0][1] == f"{died}/global_step4"


def test_what_reknit_does_not_do_for_a_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is not a DeepSpeed engine"):
        integration.take_over(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="is not a DeepSpeed engine"):
        integration.save(torch.nn.Linear(2, 2), "nowhere")
    monkeypatch.setattr(private, "is_engine", lambda _: True)
    with pytest.raises(UsageError, match="model"):
        integration.load(None, "nowhere", items={"model": 1})
    engine = SimpleNamespace(global_steps=1)
    integration.take_over(engine)
    with pytest.raises(UsageError, match="leave exclude_frozen_parameters out"):
        engine.save_checkpoint("nowhere", exclude_frozen_parameters=True)
    with pytest.raises(UsageError, match="without a custom_load_fn"):
        engine.load_checkpoint("nowhere", custom_load_fn=print)


def scaler(**values: Any) -> Any:
    import_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    made = import_scaler.DynamicLossScaler(
        init_scale=2**16,
        scale_window=2,
        min_scale=1,
        delayed_shift=2,
        consecutive_hysteresis=False,
        dtype=torch.float16,
    )
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_a_dynamic_loss_scaler_goes_on_where_it_was() -> None:
    numbers = {name: 5 for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")}
    at_work = scaler(cur_scale=2.0**11, cur_iter=9, last_overflow_iter=7, cur_hysteresis=1)
    one = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=at_work), **numbers)
    for _ in range(3):
        at_work.update_scale(False)
    other = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler()), **dict.fromkeys(numbers, 0))
    private.set_progress(other, private.progress(one))
    assert vars(other.optimizer.loss_scaler) == vars(one.optimizer.loss_scaler)
    assert vars(one.optimizer.loss_scaler) != vars(scaler())
    assert other.skipped_steps == 5
