"""The random generators of torch: the host's, and that of each device that this process uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Saved(NamedTuple):
    """A saved state of the generator of a device; `current` tells whether that was the current device."""

    kind: str
    index: int
    current: bool
    state: torch.Tensor

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


class Restored(NamedTuple):
    """Which saved states go to which devices here, and in words what is left; empty if nothing is."""

    targets: list[tuple[torch.device, torch.Tensor]]
    left: str


def states(takes: Callable[[str], bool]) -> dict[str, Any]:
    """Return the state of the host's generator, and those of devices in use whose kind `takes` accepts."""
    return {
        "torch": torch.get_rng_state(),
        "devices": [
            {
                "device": f"{kind}:{index}",
                "current": index == devices.current_index(kind),
                "state": devices.module_of(kind).get_rng_state(index),
            }
            for kind in _kinds_in_use(takes)
            for index in sorted({devices.current_index(kind), *devices.indices_with_memory(kind)})
        ],
    }


def assign(state: Mapping[str, Any], takes: Callable[[str], bool]) -> Restored:
    """Decide for which device each saved state is.

    The state of what was the current device is for the current one, whatever their numbers: launchers differ
    in whether a process sees the devices of others.  Those of further devices are for devices of the same
    number, if the current one has the same number too.  Initialises the kinds that were saved and are here.

    Raises `KeyError`, `TypeError` or `ValueError` for what `states` never returns.
    """
    saved = [one for one in _saved(state) if takes(one.kind)]
    current = {one.kind: one.index for one in saved if one.current}
    targets: list[tuple[torch.device, torch.Tensor]] = []
    absent, moved = [], []
    for one in saved:
        here = devices.current_index(one.kind) if devices.is_here(one.kind) else None
        if here is None or not (one.current or one.index < devices.num_devices(one.kind)):
            absent.append(str(one))
        elif one.current or current.get(one.kind) == here:
            targets.append((torch.device(one.kind, here if one.current else one.index), one.state))
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
    """Raise the error of a generator that cannot take its state, tried on others than those in use."""
    torch.Generator().set_state(state["torch"])
    for device, saved in restored.targets:
        try:
            generator = torch.Generator(device)
        except RuntimeError:  # of a kind of device that has no others than those in use
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
    if devices.CUDA in state:  # as reknit saved the current device's before it saved those of all devices
        yield Saved(devices.CUDA, 0, True, state[devices.CUDA])
    for record in state.get("devices", ()):
        kind, _, index = record["device"].partition(":")
        yield Saved(kind, int(index), bool(record["current"]), record["state"])


def _line(names: Iterable[str], what: str) -> str:
    joined = " and of ".join(names)
    return joined and f"the random state of {joined} is {what}"
