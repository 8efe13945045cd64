from __future__ import annotations

import importlib
import itertools
import json
import os
import shlex
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import reknit
from reknit.cli import main as cli
from tests.running.examples import examples

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


held_store, journal, ranks, source_text, tiny_llama = map(
    part, ("held_store", "journal", "ranks", "source_text", "tiny_llama")
)
fingerprint, parts, run = part("fingerprint").fingerprint, part("parts"), part("run")

TEXT = torch.arange(5000).remainder(251).to(torch.uint8)


def batches(part: int = 0, num_parts: int = 1, seed: int = 3) -> Any:
    return source_text.Batches(TEXT, num_rows=12, length=9, seed=seed, part=part, num_parts=num_parts)


# the text and the loader


@given(num_parts=st.sampled_from([1, 2, 3, 4, 6, 12]), steps=st.integers(0, 5))
@settings(max_examples=examples(20))
def test_the_shares_of_any_number_of_ranks_are_the_global_batch(num_parts: int, steps: int) -> None:
    whole = next(itertools.islice(batches(), steps, None))
    shares = [next(itertools.islice(batches(n, num_parts), steps, None)) for n in range(num_parts)]
    assert torch.equal(torch.cat(shares), whole)


def test_a_restored_loader_goes_on_where_the_saved_one_was() -> None:
    saved = batches()
    first = [next(saved) for _ in range(3)]
    state = saved.state_dict()
    expected = next(saved)
    restored = batches(seed=4)
    restored.load_state_dict(state)
    assert torch.equal(next(restored), expected)
    assert not any(torch.equal(expected, other) for other in first)


def test_a_loader_refuses_a_number_of_ranks_that_cannot_share_equally() -> None:
    with pytest.raises(ValueError, match="12 rows"):
        batches(0, 5)


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


# the processes


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return path


def is_gone(job: Any) -> bool:
    return all(process.returncode is not None for process in job.processes)


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    body = (
        "print(rank, *(os.environ[n] for n in ('WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')), *sys.argv[1:])"
    )
    with ranks.Job("job", script(tmp_path, body), ["x"], world=3, logs=tmp_path) as job:
        job.wait(60)
    said = [job.said(rank).split() for rank in range(3)]
    assert [words[0] for words in said] == ["0", "1", "2"]
    assert said[0][1:] == said[1][1:] == said[2][1:]
    assert said[0][1:3] == ["3", "127.0.0.1"]
    assert said[0][4:] == ["x"]


def test_when_a_rank_fails_the_others_are_ended_and_the_last_words_of_all_are_there(tmp_path: Path) -> None:
    path = script(tmp_path, "sys.exit('no luck') if rank == 1 else time.sleep(600)")
    job = ranks.Job("job", path, [], world=2, logs=tmp_path)
    with pytest.raises(ranks.JobFailed, match="rank 1 ended with 1"), job:
        job.wait(60)
    assert is_gone(job)
    assert job.last_words() == "job, rank 0:\n    (nothing)\njob, rank 1:\n    no luck"


def test_a_killed_rank_is_gone_and_those_that_linger_are_named(tmp_path: Path) -> None:
    path = script(tmp_path, "print('up', flush=True); rank or sys.exit(3); time.sleep(600)")
    with ranks.Job("job", path, [], world=3, logs=tmp_path) as job:
        while not all(job.said(rank) for rank in range(3)):
            assert all(process.poll() in (None, 3) for process in job.processes)
        job.kill(2)
        assert job.end(grace_s=0.5) == [1]
    assert [process.returncode for process in job.processes] == [3, -9, -9]
    for process in job.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


AGENT = (
    "import subprocess\n"
    "command = [sys.executable, '-c', 'import time; time.sleep(600)', 'reknit.engine.background.agent']\n"
    "agent = subprocess.Popen(command, start_new_session=True)\n"
    "print(agent.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def agents(job: Any, world: int) -> list[int]:
    while not all(job.said(rank).endswith("\n") for rank in range(world)):
        assert all(process.poll() is None for process in job.processes)
    return [int(job.said(rank)) for rank in range(world)]


def runs(pid: int) -> bool:
    try:
        return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_killed_ranks_leave_their_agents_until_the_block_ends(tmp_path: Path) -> None:
    with ranks.Job("job", script(tmp_path, AGENT), [], world=2, logs=tmp_path) as job:
        pids = agents(job, 2)
        job.kill(0, 1)
        job.end(grace_s=10)
        assert [runs(pid) for pid in pids] == [True, True]
        with pytest.raises(ranks.JobFailed, match="agents still run"):
            job.wait_for_agents(0.1)
    job.wait_for_agents(30)
    assert [runs(pid) for pid in pids] == [False, False]


# the store that stands still


def test_no_file_is_begun_in_a_folder_that_is_held(tmp_path: Path) -> None:
    hold = tmp_path / "step.hold"
    hold.touch()
    folder = held_store.open_held(f"held://{tmp_path / 'step'}", "process")
    thread = threading.Thread(target=lambda: folder.create("file", 0).finish())
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert not (tmp_path / "step").exists()
    hold.unlink()
    thread.join()
    assert (tmp_path / "step" / "file").exists()


# the table and the exit status


def test_the_whole_lines_of_a_journal_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert journal.read_journal(tmp_path / "none").losses == {}
    records: list[dict[str, Any]] = [
        {"loaded": "x", "step": 4, "notes": {"rng": "left"}, "resharded": 2},
        {"step": 5, "loss": 0.1 + 0.2},
        {"fingerprint": "f"},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "j").write_text(lines + '{"step": 6, "lo')
    found = journal.read_journal(tmp_path / "j")
    assert (found.loaded, found.losses, found.fingerprint) == (records[0], {5: 0.1 + 0.2}, "f")


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


def test_the_parts_that_lose_ranks_wait_for_slow_agents(tmp_path: Path) -> None:
    demo = parts.Demo(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "delay").write_text("1.0")  # longer than the steps until a rank is lost
    demo.lost_rank()
    assert [check for check in demo.checks if not check.ok] == []
