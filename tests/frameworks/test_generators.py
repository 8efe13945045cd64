"""Random generators of devices: which are saved, where are they restored, and which are reported?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import UsageError
from reknit.frameworks.per_rank import RngState
from reknit.frameworks.registry import wanted
from tests.devices import every_device, every_simulated_device, on_simulated_cuda, run_simulated
from tests.frameworks.checkpoint import fill, load, save

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerator import Accelerator


def module(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def drawn(*devices: str) -> list[list[float]]:
    return [torch.rand(3, device=device).tolist() for device in devices]


def notes(target: dict[str, Any], checkpoint: Any) -> list[str]:
    want = wanted(target, checkpoint.catalog(), 0, 1)
    assert not want.missing
    assert not want.mismatched
    fill(want, checkpoint)
    return [what for _, _, what in want.notes]


@every_device
def test_random_numbers_of_every_device_go_on(device_type: str) -> None:
    used = [f"{device_type}:{index}" for index in range(min(2, module(device_type).device_count()))]
    torch.manual_seed(3)
    drawn(*used)
    checkpoint = save({"rng": RngState()})
    expected = drawn(*used)
    torch.manual_seed(5)
    assert notes({"rng": RngState()}, checkpoint) == []
    assert drawn(*used) == expected


@every_simulated_device
def test_a_grad_scaler_and_the_numbers_of_device_1_go_on_where_the_current_device_is_0(
    device_type: str, tmp_path: Path
) -> None:
    device = f"{device_type}:1"
    ones = torch.ones(64, device=device)
    scaler = torch.amp.GradScaler(device_type)
    scaler.scale(ones.sum())
    state = {"rng": RngState(), "scaler": scaler}
    reknit.save(tmp_path / "x", state)
    expected = drawn(device)
    scaler.update(2.0)
    report = reknit.load(tmp_path / "x", state)
    assert report is not None
    assert not report.notes
    assert drawn(device) == expected
    assert scaler.get_scale() == 2.0**16
    assert str(scaler.scale(ones).device) == device


@every_simulated_device
def test_the_current_device_goes_on_whatever_its_number(device_type: str) -> None:
    module(device_type).manual_seed_all(3)
    module(device_type).set_device(1)
    state = RngState().state_dict()
    assert state["devices"][0]["device"] == device_type
    del state["devices"][1:]
    checkpoint = save({"rng": RngState()})
    checkpoint.own["rng", (("rank", 0),)][""] = state
    expected = drawn(device_type)
    module(device_type).set_device(0)
    drawn(f"{device_type}:0")
    load({"rng": RngState()}, checkpoint)
    assert drawn(device_type) == expected


@every_simulated_device
def test_states_that_have_no_device_here_and_devices_without_a_state_are_noted(device_type: str) -> None:
    module(device_type).set_device(0)
    drawn(f"{device_type}:0", f"{device_type}:1")
    checkpoint = save({"rng": RngState()})
    (state,) = (values[""] for values in checkpoint.own.values())
    records = {one["device"]: one for one in state["devices"]}
    assert list(records) == [device_type, f"{device_type}:1"]
    absent = "is not restored: this process has no such device"
    for name in (f"{device_type}:7", "xpu", "abacus:0"):
        state["devices"] = [*records.values(), {**records[f"{device_type}:1"], "device": name}]
        assert notes({"rng": RngState()}, checkpoint) == [f"the random state of {name} {absent}"]
    state["devices"] = [records[device_type]]
    kept = f"the random state of {device_type}:1 is not in the checkpoint, and stays as it is"
    assert notes({"rng": RngState()}, checkpoint) == [kept]
    state["devices"] = list(records.values())
    module(device_type).set_device(1)
    try:
        (line,) = notes({"rng": RngState()}, checkpoint)
    finally:
        module(device_type).set_device(0)
    moved = "is not restored: the current device had another number when it was saved"
    assert line.startswith(f"the random state of {device_type}:1 {moved}; ")
    assert notes({"rng": RngState(devices=False)}, checkpoint) == []


@every_simulated_device
def test_ranks_that_share_a_coordinate_have_one_state_on_different_devices(device_type: str) -> None:
    for_each = []
    for number in range(2):
        module(device_type).set_device(number)
        torch.manual_seed(4)
        drawn(f"{device_type}:{number}")
        for_each.append([one for one in RngState().state_dict()["devices"] if "beside" not in one])
    module(device_type).set_device(0)
    (one,), (other,) = for_each
    assert one["device"] == other["device"] == device_type
    assert torch.equal(one["state"], other["state"])


@every_simulated_device
def test_a_state_of_another_kind_of_generator_is_refused_before_any_is_set(device_type: str) -> None:
    checkpoint = save({"rng": RngState()})
    (state,) = (values[""] for values in checkpoint.own.values())
    expected = RngState().state_dict()
    for wrong in (torch.zeros(5, dtype=torch.uint8), "nothing"):
        state["devices"] = [{"device": device_type, "state": wrong}]
        want = wanted({"rng": RngState()}, checkpoint.catalog(), 0, 1)
        (entry,) = want.mismatched
        assert "is not a state of random generators" in entry[2]
    assert RngState().state_dict()["torch"].equal(expected["torch"])


@on_simulated_cuda
def test_the_state_of_a_gpu_in_an_older_checkpoint_is_restored(accelerator: Accelerator) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    checkpoint = save({"rng": RngState(cuda=False)})
    (state,) = (values[""] for values in checkpoint.own.values())
    del state["devices"]
    state["cuda"] = torch.cuda.get_rng_state()
    expected = drawn("cuda")
    load({"rng": RngState(cuda=False)}, checkpoint)
    assert drawn("cuda") != expected
    load({"rng": RngState()}, checkpoint)
    assert drawn("cuda") == expected


def resumed(state: Any) -> tuple[bool, list[list[float]]]:
    """Restore a state in a process that has seeded a device, and not used it."""
    torch.manual_seed(9)
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    RngState().load_state_dict(state)
    return initialised, drawn("cuda:0")


@on_simulated_cuda
def test_a_state_is_restored_over_a_seed_that_waits_for_the_device(accelerator: Accelerator) -> None:
    drawn("cuda:0")
    state = RngState().state_dict()
    del state["devices"][1:]
    expected = drawn("cuda:0")
    assert run_simulated(1, resumed, state, joined=False) == [(False, expected)]


def test_the_state_of_a_gpu_is_noted_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    checkpoint = save({"rng": RngState()})
    (state,) = (values[""] for values in checkpoint.own.values())
    state["cuda"] = state["torch"]
    line = "the random state of cuda is not restored: this process has no such device"
    assert notes({"rng": RngState()}, checkpoint) == [line]
    assert not caplog.messages
    live = RngState().state_dict()
    RngState().load_state_dict({**live, "cuda": live["torch"]})
    assert caplog.messages == [line]


def test_generators_of_devices_are_left_out_on_request() -> None:
    for options in ({"devices": False}, {"cuda": False}):
        assert "cuda" not in str(RngState(**options).state_dict()["devices"])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"is True or False, not"):
            RngState(**dict.fromkeys(options, "no"))  # type: ignore[arg-type]


@every_device
def test_a_generator_of_a_device_is_refused_and_its_state_is_saved(device_type: str, tmp_path: Path) -> None:
    generator = torch.Generator(device=device_type)
    with pytest.raises(reknit.errors.StateError, match=r"save the result of its get_state\(\)"):
        reknit.save(tmp_path / "x", {"shuffle": generator})
    reknit.save(tmp_path / "x", {"shuffle": generator.get_state()})
    expected = torch.rand(3, device=device_type, generator=generator).tolist()
    target = {"shuffle": torch.Generator(device=device_type).get_state()}
    reknit.load(tmp_path / "x", target)
    generator.set_state(target["shuffle"])
    assert torch.rand(3, device=device_type, generator=generator).tolist() == expected
