from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import reknit
from reknit.integrations.dcp import export as dcp_export
from reknit.integrations.dcp.export import export_dcp
from reknit.integrations.formats import export as tensor_stream
from tests.integrations.formats.checkpoints import (
    columns,
    every_dtype,
    same,
    save_in_boxes,
    save_training,
    trained,
)
from tests.ranks import Died, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def loaded(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_dcp_reads_every_dtype_bit_for_bit(tmp_path: Path) -> None:
    state = every_dtype()
    reknit.save(tmp_path / "c", {"model": state})
    report = export_dcp(tmp_path / "c", tmp_path / "out", verify=True)
    empty = {dtype: {name: torch.empty_like(t) for name, t in all_.items()} for dtype, all_ in state.items()}
    found = loaded(tmp_path / "out", {"model": empty})["model"]
    assert all(same(found[dtype][name], one) for dtype, all_ in state.items() for name, one in all_.items())
    assert (report.num_tensors, report.verified) == (3 * len(state), True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out"]


def test_properties_have_the_fields_that_every_torch_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As torch 2.15 does, whose folders earlier versions refuse.
    before: Any = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*before(self)[:5], None))
    reknit.save(tmp_path / "c", {"model": {"w": torch.arange(6.0)}})
    export_dcp(tmp_path / "c", tmp_path / "out")
    monkeypatch.undo()
    assert loaded(tmp_path / "out", {"model": {"w": torch.zeros(6)}})["model"]["w"].tolist() == [*range(6)]


def test_model_and_optimizer_load_what_dcp_reads(tmp_path: Path) -> None:
    net, optimizer = save_training(tmp_path / "c")
    report = export_dcp(tmp_path / "c", tmp_path / "out", verify=True)
    assert list(report.left_out) == ["rng"]
    other, fresh = trained()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    model, states = get_state_dict(other, fresh)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": states,
        "values": {"epoch": 0, "mixed": (), "text": ""},
    }
    loaded(tmp_path / "out", state)
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["values"] == {"epoch": 3, "mixed": (1, 2.5), "text": "x"}
    assert fresh.param_groups[0]["lr"] == 0.1
    assert all(same(other.state_dict()[name], one) for name, one in net.state_dict().items())
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert all(same(optimizer.state[one][key], fresh.state[two][key]) for key in optimizer.state[one])


def test_large_tensors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).standard_normal((50, 301))
    small = {f"s{n}": np.full((n,), n, np.float32) for n in range(5)}
    save_in_boxes(tmp_path / "c", {"w": array, **small}, {"w": columns((50, 301), 7)})
    monkeypatch.setattr(dcp_export, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(tensor_stream, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(dcp_export, "FILE_NBYTES", 20_000)
    export_dcp(tmp_path / "c", tmp_path / "out", verify=True)
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 5
    found = loaded(tmp_path / "out", {"model.w": torch.empty(50, 301, dtype=torch.float64)})
    assert np.array_equal(found["model.w"].numpy(), array)


def killed(source: str, out: str) -> None:
    """Export, and die when all but the metadata of DCP is written."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    FileSystemWriter.finish = die  # type: ignore[method-assign]  # in a process that ends here
    export_dcp(source, out)


def test_a_killed_export_leaves_no_folder_that_looks_whole(tmp_path: Path) -> None:
    save_training(tmp_path / "c")
    (died,) = run(1, killed, str(tmp_path / "c"), str(tmp_path / "out"), some_die=True, joined=False)
    assert died == Died(-signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    (rest,) = (path for path in tmp_path.iterdir() if path.name != "c")
    assert rest.name.startswith(".out.")
    assert not (rest / ".metadata").exists()
    export_dcp(tmp_path / "c", tmp_path / "out", verify=True)
