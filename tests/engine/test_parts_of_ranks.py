"""Local checkpoints of NVIDIA's resiliency extension: each file is one rank's part, and is named as such.

The extension saves an object of a class with `torch.save`.  A class of the same module and name stands for it
here, since the extension needs devices of NVIDIA: the bytes are the same.
"""

from __future__ import annotations

import io
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.cli.main import main
from reknit.integrations.formats.recognise import HEAD_NBYTES, kind_of
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULE = "nvidia_resiliency_ext.checkpointing.local.basic_state_dict"


@pytest.fixture
def basic(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """Return the class of the extension."""
    kind = type("BasicTensorAwareStateDict", (), {"__module__": MODULE})
    names = MODULE.split(".")
    for end in range(1, len(names) + 1):
        name = ".".join(names[:end])
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
    module.BasicTensorAwareStateDict = kind  # type: ignore[attr-defined]
    return kind


def part(kind: type[Any], iteration: int = 5) -> object:
    made = kind()
    made.state_dict = {"model": {"w": torch.ones(2)}, "iteration": iteration}
    made._is_hollow = False
    return made


def save_part(session: Path, kind: type[Any], iteration: int = 5, rank: int = 0) -> Path:
    folder = session / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(part(kind, iteration), place := folder / f"iter_{iteration:07d}_{rank}_local.pt")
    return place


def kind_of_saved(value: object, **options: Any) -> str:
    torch.save(value, saved := io.BytesIO(), **options)
    return kind_of(saved.getvalue()[:HEAD_NBYTES], len(saved.getvalue()))


def test_a_part_is_named_with_the_way_to_load_it_by_every_call(
    basic: type[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save_part(tmp_path / "local" / "session", basic)
    loads = f"manager = LocalCheckpointManager('{tmp_path}/local/session'); manager.find_latest()"
    calls: list[Callable[[Path], object]] = [
        reknit.open,
        reknit.verify,
        lambda at: reknit.load(at, {"model": {"w": torch.zeros(2)}}),
    ]
    for call in calls:
        with pytest.raises(reknit.CheckpointNotFoundError, match="one rank's part of a local") as caught:
            call(place)
        assert loads in str(caught.value.remedy)
    looks: list[Callable[[Path], object]] = [
        reknit.latest,
        reknit.steps,
        lambda at: reknit.Checkpointer(at).resume({"a": 1}),
    ]
    for look in looks:
        with pytest.raises(reknit.UsageError, match="one rank's part of a local") as refused:
            look(place)
        assert loads in str(refused.value.remedy)
    for words in (["show"], ["verify"], ["ls"], ["import"]):
        more = [str(tmp_path / "new")] if words == ["import"] else []
        assert main([*words, str(place), *more]) != 0
        assert loads in capsys.readouterr().err, words
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("at", "ranks", "iterations"), [("", 1, (5,)), ("session", 12, (5, 10)), ("session/0", 12, (5,))]
)
def test_a_run_does_not_begin_at_0_beside_parts(
    basic: type[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    at: str,
    ranks: int,
    iterations: tuple[int, ...],
) -> None:
    for rank in range(ranks):
        for iteration in iterations:
            save_part(tmp_path / "session", basic, iteration, rank)
    root = tmp_path / at if at else tmp_path
    rank = 0 if at.endswith("0") else ranks - 1
    newest = f"{rank}/iter_{iterations[-1]:07d}_{rank}_local.pt"
    with reknit.Checkpointer(root) as run, pytest.raises(reknit.UsageError) as refused:
        run.resume({"a": 1})
    assert f"session/{newest} is one rank's part" in str(refused.value)
    assert f"LocalCheckpointManager('{tmp_path}/session')" in str(refused.value.remedy)
    assert "resume(state, start=0)" in str(refused.value.remedy)
    with pytest.raises(reknit.CheckpointNotFoundError) as caught:
        reknit.open(root)
    assert newest.rpartition("/")[2] in str(caught.value.remedy)
    assert "reknit.open(" not in str(caught.value.remedy)
    with caplog.at_level(logging.WARNING, "reknit"):
        assert reknit.latest(root) is None
        assert not reknit.steps(root)
    assert newest.rpartition("/")[2] in caplog.text
    with reknit.Checkpointer(root) as run:
        assert run.resume({"a": 1}, start=0) == 0


def test_ranks_without_a_file_are_no_earlier_work(tmp_path: Path) -> None:
    (tmp_path / "session" / "0").mkdir(parents=True)
    for root in (tmp_path, tmp_path / "session", tmp_path / "session" / "0"):
        with reknit.Checkpointer(root) as run:
            assert run.resume({"a": 1}) == 0


def test_files_of_other_programs_in_folders_of_folders_stay_unseen(tmp_path: Path) -> None:
    (tmp_path / "data" / "0").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "data" / "0" / "iter_0000005_0_local.pt")
    with reknit.Checkpointer(tmp_path) as run:
        assert run.resume({"a": 1}) == 0


def test_a_part_is_recognised_in_each_form_of_a_pickle(basic: type[Any]) -> None:
    for protocol in one_by_one([2, 3, 4, 5]):
        assert kind_of_saved(part(basic), pickle_protocol=protocol) == "NVRx"
    assert kind_of_saved(part(basic), _use_new_zipfile_serialization=False) == "NVRx"


def test_a_file_that_has_a_part_among_others_is_a_file_of_torch(basic: type[Any]) -> None:
    for protocol in one_by_one([2, 4]):
        value = {"w": torch.ones(2), "part": part(basic)}
        assert kind_of_saved(value, pickle_protocol=protocol) == "torch.save"
        assert kind_of_saved({"cTensorAwareStateDict\n": 1}) == "torch.save"
