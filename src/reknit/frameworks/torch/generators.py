"""The random generators of torch: the host's, and that of each device that this process uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Saved(NamedTuple):
    """A saved state of the generator of a device.

    The device was the current one, or the device of this `number` while the current one had the number
    `beside`.
    """

    kind: str
    state: torch.Tensor
    number: int | None = None
    beside: int | None = None

    def __str__(self) -> str:
        return self.kind if self.number is None else f"{self.kind}:{self.number}"


class Restored(NamedTuple):
    """The saved states for devices here, and in words the rest; empty if all are restored."""

    targets: list[tuple[torch.device, torch.Tensor]]
    left: str


def states(takes: Callable[[str], bool]) -> dict[str, Any]:
    """Return the state of the host's generator, and those of devices in use with a kind that `takes` accepts.

    The state of a current device has no number, so that ranks with equal states on different devices agree.
    """
    records = []
    for kind in _kinds_in_use(takes):
        state_of, here = devices.module_of(kind).get_rng_state, devices.current_index(kind)
        records.append({"device": kind, "state": state_of(here)})
        records += [
            {"device": f"{kind}:{number}", "beside": here, "state": state_of(number)}
            for number in devices.indices_with_memory(kind)
            if number != here
        ]
    return {"torch": torch.get_rng_state(), "devices": records}


def assign(state: Mapping[str, Any], takes: Callable[[str], bool]) -> Restored:
    """Return the device for each saved state, and the states without a device.

    The state of the former current device is for the present one, even if their numbers differ: launchers
    differ in the devices that a process sees.  The states of further devices are for devices of the same
    number, if the current one has the same number too.  Initialises the kinds that were saved and are here.

    Raises `KeyError`, `TypeError` or `ValueError` for a value that `states` never returns.
    """
    targets: list[tuple[torch.device, torch.Tensor]] = []
    absent, moved = [], []
    for one in _saved(state):
        if not takes(one.kind):
            continue
        here = devices.current_index(one.kind) if devices.is_here(one.kind) else None
        if here is None or (one.number or 0) >= devices.num_devices(one.kind):
            absent.append(str(one))
        elif one.number is None or one.beside == here:
            targets.append((torch.device(one.kind, here if one.number is None else one.number), one.state))
        else:
            moved.append(str(one))
    filled = {device for device, _ in targets}
    used = [
        torch.device(kind, index)
        for kind in _kinds_in_use(takes)
        for index in devices.indices_with_memory(kind)
    ]
    lines = (
        _line(absent, "not restored: this process has no such device"),
        _line(moved, "not restored: the current device had another number when it was saved"),
        _line([str(one) for one in used if one not in filled], "not in the checkpoint, and stays as it is"),
    )
    return Restored(targets, "; ".join(filter(None, lines)))


def require_fitting(state: Mapping[str, Any], restored: Restored) -> None:
    """Raise the error of a generator that cannot take its state, tried on generators that are not in use."""
    torch.Generator().set_state(state["torch"])
    for device, saved in restored.targets:
        try:
            generator = torch.Generator(device)
        except RuntimeError:  # of a kind of device on which no other generator can be made
            continue
        generator.set_state(saved)


def put(state: Mapping[str, Any], restored: Restored) -> None:
    """Set the generators of the host and of devices."""
    torch.set_rng_state(state["torch"])
    for device, saved in restored.targets:
        devices.module_of(device).set_rng_state(saved, device.index)


def _kinds_in_use(takes: Callable[[str], bool]) -> Iterator[str]:
    for kind in filter(takes, devices.kinds_in_use()):
        if hasattr(devices.module_of(kind), "get_rng_state"):
            yield kind


def _saved(state: Mapping[str, Any]) -> Iterator[Saved]:
    if devices.CUDA in state:  # an older reknit saved the state of the current device only
        yield Saved(devices.CUDA, state[devices.CUDA])
    for record in state.get("devices", ()):
        kind, _, number = record["device"].partition(":")
        yield Saved(kind, record["state"], int(number) if number else None, record.get("beside"))


def _line(names: Iterable[str], what: str) -> str:
    joined = " and of ".join(names)
    return joined and f"the random state of {joined} is {what}"
