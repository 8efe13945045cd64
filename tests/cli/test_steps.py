"""`reknit latest`, `rm` and `prune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with reknit.Checkpointer(tmp_path / "run", wait=True) as run:
        for step in (10, 20, 30, 40):
            run.save(step, {"model": {"w": np.arange(1000)}}, {"loss": abs(step - 21)})
    return tmp_path / "run"


def steps(root: Path) -> list[int | None]:
    return [each.step for each in reknit.steps(root)]


def test_latest_prints_a_path(command: Command, root: Path) -> None:
    ran = command("latest", root)
    assert (ran.code, ran.out) == (0, f"{root}/step_00000040\n")
    assert command("latest", root, "--json").json == {"path": f"{root}/step_00000040"}
    ran = command("latest", root / "typo")
    assert (ran.code, ran.out) == (3, "")
    assert f"there is no checkpoint directly below {root}/typo" in ran.err
    assert f"-> {root}/typo does not exist" in ran.err


def test_rm_removes_what_is_named_and_no_more(command: Command, root: Path) -> None:
    ran = command("rm", root / "step_00000010", root / "step_00000030")
    assert ran.code == 0
    assert ran.out.count("removed ") == 2
    assert steps(root) == [20, 40]
    assert command("rm", root / "step_00000010").code == 3
    assert command("rm", root).code == 3
    assert command("rm", root / "step_00000020", "--json").json[0]["nbytes"] > 8000
    assert steps(root) == [40]


def test_prune_removes_what_no_option_keeps(command: Command, root: Path) -> None:
    dry = command("prune", root, "--keep-last", "1", "--keep-best", "1:loss", "--dry-run")
    assert dry.code == 0
    assert [line.split(" (")[0] for line in dry.out.splitlines()] == [
        f"would remove {root}/step_00000010",
        f"would remove {root}/step_00000030",
    ]
    assert steps(root) == [10, 20, 30, 40]
    ran = command("prune", root, "--keep-last", "1", "--keep-best", "1:loss", "--json")
    assert [each["step"] for each in ran.json] == [10, 30]
    assert steps(root) == [20, 40]
    assert (
        command("prune", root, "--keep-every", "20", "--keep-days", "1").out == "there is nothing to remove\n"
    )


def test_prune_without_a_sensible_wish_removes_nothing(command: Command, root: Path) -> None:
    wishes: list[tuple[list[str], str]] = [
        ([], ""),
        (["--keep-last", "0"], ""),
        (["--keep-best", "loss"], ""),
        (["--keep-best", "1:loss:up"], ""),
        (["--keep-best", "9" * 5_000 + ":loss"], ""),
        (["--keep-best", "2:lsos"], "did you mean 'loss'?"),
        (["--keep-every", "9" * 4_000], ""),
        (["--keep-days", "9" * 4_000], ""),
        *(
            (["--keep-last", "1", "--drop", wrong], "")
            for wrong in ("m", "m:x", ":", "m:-1", "m:" + "9" * 5_000)
        ),
        (["--keep-last", "9", "--drop", "modle:1"], "without names 'modle'"),
        (["--keep-last", "9", "--drop", "modle:1"], "did you mean 'model'?"),
    ]
    for options, said in wishes:
        ran = command("prune", root, *options)
        assert ran.code == 2, options
        assert said in ran.err
    assert steps(root) == [10, 20, 30, 40]


def test_prune_takes_metrics_whose_names_have_colons(command: Command, root: Path) -> None:
    reknit.note(root / "step_00000020", {"val:loss": 1.0})
    ran = command("prune", root, "--keep-best", "1:val:loss:max", "--dry-run", "--json")
    assert [each["step"] for each in ran.json] == [10, 30]


def with_optimizers(root: Path) -> None:
    for step in (1, 2, 3):
        state = {"model": {"w": np.arange(1000)}, "optimizer": {"m": np.arange(1000)}}
        reknit.save(root / f"step_{step:08d}", state, step=step)


def test_prune_names_only_items_that_it_has_removed(command: Command, tmp_path: Path) -> None:
    with_optimizers(tmp_path)
    marker = tmp_path / "step_00000001" / f"pending.{7:016x}.{'a' * 8}"
    marker.touch()
    ran = command("prune", tmp_path, "--keep-every", "1", "--drop", "optimizer:1e-9")
    assert ran.out == f"removed optimizer of {tmp_path}/step_00000002 (step 2)\n"
    assert [each.dropped for each in reknit.steps(tmp_path)] == [(), ("optimizer",), ()]


def test_prune_of_a_wrong_path_says_so(command: Command, root: Path) -> None:
    assert command("prune", root / "typo", "--keep-last", "1").code == 3
    ran = command("prune", root / "step_00000010", "--keep-last", "1")
    assert ran.code == 2
    assert "is a checkpoint" in ran.err


def test_a_pinned_step_stays_and_says_why(command: Command, root: Path) -> None:
    pinned = root / "step_00000010"
    assert command("pin", pinned, "--reason", "figure 3").out == f"pinned {pinned}\n"
    ran = command("rm", pinned)
    assert ran.code == 2
    assert "it is pinned: 'figure 3'" in ran.err
    assert "reknit unpin" in ran.err
    assert command("prune", root, "--keep-last", "1").code == 0
    assert steps(root) == [10, 40]
    assert command("unpin", pinned).out == f"unpinned {pinned}\n"
    assert command("unpin", pinned).out == f"was not pinned: {pinned}\n"
    assert command("rm", pinned).code == 0
    assert command("pin", root / "typo").code == 3


def test_items_are_removed_of_steps_that_stay(command: Command, tmp_path: Path) -> None:
    with_optimizers(tmp_path)
    one = tmp_path / "step_00000001"
    assert command("rm", one, "--item", "optimizer", "--dry-run").out.startswith("would remove optimizer of ")
    assert command("rm", one, "--item", "optimizer").out == f"removed optimizer of {one}: 11.8 KiB\n"
    assert command("rm", one, "--item", "typo").code == 4
    keep = ("prune", tmp_path, "--keep-every", "1", "--drop", "optimizer:1e-9")
    text = f"optimizer of {tmp_path}/step_00000002 (step 2)\n"
    assert command(*keep, "--dry-run").out == f"would remove {text}"
    assert command(*keep, "--json").json == [
        {"step": 2, "path": f"{tmp_path}/step_00000002", "items": ["optimizer"]}
    ]
    assert [each.items for each in reknit.steps(tmp_path)] == [("model",)] * 2 + [("model", "optimizer")]
