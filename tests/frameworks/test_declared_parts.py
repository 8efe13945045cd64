"""Plain tensors that declare themselves parts of a larger tensor, as torch's `CheckpointableTensor` does."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reknit
from reknit.errors import ReknitError, StateError
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import TensorSpec
from tests.frameworks.checkpoint import assemble, fill, portable
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
WHOLE = torch.arange(24.0).reshape(4, 6)
PADDING = -1.0

Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def declared(local: Any, *parts: Part, shape: tuple[int, ...] = (4, 6)) -> Any:
    """Declare parts, each with its offsets in the whole, its offsets here, and its sizes."""
    there, here, sizes = zip(*parts, strict=True) if parts else ((), (), ())
    for name, value in zip(NAMES, (shape, there, here, sizes), strict=True):
        setattr(local, name, value)
    return local


def rows(rank: int, values: torch.Tensor = WHOLE) -> Any:
    """Return two rows of four, on rank 0 or 1."""
    return declared(values[2 * rank : 2 * rank + 2].clone(), ((2 * rank, 0), (0, 0), (2, 6)))


def columns(rank: int, values: torch.Tensor = WHOLE) -> Any:
    """Return one or three of the first four columns, and half of the last two, with padding around them."""
    local = torch.full((5, 4), PADDING)
    first = 0 if rank == 0 else 1
    width = 1 if rank == 0 else 3
    local[0:4, 0:width] = values[:, first : first + width]
    if rank == 0:
        local[1:3, 2:4] = values[0:2, 4:6]
        return declared(local, ((0, 0), (0, 0), (4, 1)), ((0, 4), (1, 2), (2, 2)))
    local = torch.cat((local, torch.full((5, 3), PADDING)), 1)
    local[2:4, 5:7] = values[2:4, 4:6]
    return declared(local, ((0, 1), (0, 0), (4, 3)), ((2, 4), (2, 5), (2, 2)))


def blank(like: torch.Tensor) -> Any:
    """Return memory with other values and the same declaration."""
    new = torch.full_like(like, 7.0)
    for name in NAMES:
        setattr(new, name, getattr(like, name))
    return new


def is_filled(got: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether the parts have the values of another tensor, and the padding is as `blank` left it."""
    inside = like != PADDING
    return torch.equal(got[inside], like[inside]) and bool(got[~inside].eq(7).all())


FORMS: dict[str, Callable[..., Any]] = {"rows": rows, "columns": columns}


def in_all_forms(folder: str) -> list[str]:
    """Save each form, and load it whole and into each form; return the pairs that differ."""
    rank, wrong = dist.get_rank(), []
    for name, form in FORMS.items():
        path, tied = f"{folder}/{name}", form(rank)
        reknit.save(path, {"state": {"w": tied, "again": tied}})
        with reknit.open(path) as checkpoint:
            specs = dict(checkpoint.tensors["state"])
        assert specs == dict.fromkeys(("w", "again"), TensorSpec((4, 6), "float32"))
        whole = torch.zeros(4, 6)
        reknit.load(path, {"state": {"w": whole, "again": whole}})
        if not torch.equal(whole, WHOLE):
            wrong.append(f"{name} whole")
        for into, other in FORMS.items():
            got = blank(other(rank))
            reknit.load(path, {"state": {"w": got, "again": got}})
            if not is_filled(got, other(rank)):
                wrong.append(f"{name} into {into}")
    return wrong


def test_parts_of_any_form_are_one_tensor_and_padding_stays_as_it_is(tmp_path: Path) -> None:
    assert run(2, in_all_forms, str(tmp_path)) == [[]] * 2


class Parts(nn.Module):
    """A parameter and a buffer that are parts, beside a layer that every rank has whole."""

    def __init__(self, form: Callable[..., Any], rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        part = form(rank)
        self.w = declared_as(part, nn.Parameter(part.clone()))
        self.register_buffer("b", form(rank, WHOLE + 100))
        self.head = nn.Linear(2, 2)


def declared_as(like: Any, new: Any) -> Any:
    for name in NAMES:
        setattr(new, name, getattr(like, name))
    return new


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(WHOLE.clone())
        self.register_buffer("b", WHOLE + 100)
        self.head = nn.Linear(2, 2)


class Detaching(Parts):
    """A module with a state dict of its own, whose tensors are views without attributes."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {key: value.detach() for key, value in super().state_dict().items()}


def trained(module: nn.Module) -> dict[str, Any]:
    """Return a module and its optimizer after a step whose gradients are functions of the values alone."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = parameter.detach() / 8
    optimizer.step()
    return {"model": module, "optimizer": optimizer}


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    module, optimizer = state["model"], state["optimizer"]
    found = {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return found


def cleared(state: dict[str, Any], *, states: bool) -> dict[str, Any]:
    """Change all values of a module and its optimizer, or drop the states of the optimizer."""
    if not states:
        state["optimizer"].state.clear()
    with torch.no_grad():
        for value in (*state["model"].parameters(), *state["model"].buffers()):
            value.fill_(7)
    for each in state["optimizer"].state.values():
        for value in each.values():
            value.fill_(7)
    return state


def resumed(folder: str) -> list[str]:
    """Save each form of a trained module, and load it whole and into each form, with and without states."""
    rank, wrong = dist.get_rank(), []
    truth = {name: value.clone() for name, value in tensors(trained(Whole())).items()}
    for name, kind, form in (
        ("rows", Parts, rows),
        ("columns", Parts, columns),
        ("detached", Detaching, rows),
    ):
        path = f"{folder}/{name}"
        reknit.save(path, trained(kind(form, rank)))
        for states in (True, False):
            whole = cleared(trained(Whole()), states=states)
            reknit.load(path, whole)
            found = tensors(whole)
            wrong += [f"{name} {key} {states}" for key in truth if not torch.equal(found[key], truth[key])]
            for into, other in FORMS.items():
                part = cleared(trained(Parts(other, rank)), states=states)
                reknit.load(path, part)
                found = tensors(part)
                inside = other(rank) != PADDING
                for key, value in found.items():
                    true = truth[key]
                    if value.shape == inside.shape and true.shape == WHOLE.shape:
                        if "/" in key and not states and not value[~inside].eq(0).all():
                            wrong.append(f"{name} into {into}: padding of {key}")
                        value, true = value[inside], other(rank, true)[inside]
                    if not torch.equal(value, true):
                        wrong.append(f"{name} into {into}: {key} {states}")
    return wrong


def test_parameters_buffers_and_the_states_of_their_optimizer_follow_the_declared_parts(
    tmp_path: Path,
) -> None:
    assert run(2, resumed, str(tmp_path)) == [[]] * 2


class Average:
    """An object with a state dict, which holds parts."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def elsewhere(folder: str) -> list[bool]:
    """Load parts in an object, on the meta device, in a copy of a module, and after a new declaration."""
    rank, right = dist.get_rank(), []
    average = Average(rows(rank))
    reknit.save(f"{folder}/object", {"ema": average})
    other, whole = Average(blank(columns(rank))), Average(torch.zeros(4, 6))
    for one in (other, whole):
        reknit.load(f"{folder}/object", {"ema": one})
    inside = columns(rank) != PADDING
    right += [torch.equal(other.value[inside], columns(rank)[inside]), torch.equal(whole.value, WHOLE)]
    reknit.save(f"{folder}/model", {"model": Parts(rows, rank)})
    empty = Parts(columns, rank).to("meta")
    for name in ("w", "b"):
        declared_as(columns(rank), getattr(empty, name))
    reknit.load(f"{folder}/model", {"model": empty})
    right.append(torch.equal(empty.w[inside], columns(rank)[inside]) and hasattr(empty.w, "global_shape"))
    averaged = copy.deepcopy(Parts(rows, rank))  # torch copies parameters without their attributes
    for new, old in zip(averaged.parameters(), Parts(rows, rank).parameters(), strict=True):
        if hasattr(old, "global_shape"):
            declared_as(old, new)
    reknit.save(f"{folder}/copy", {"average": averaged})
    again = Whole()
    reknit.load(f"{folder}/copy", {"average": again})
    right.append(torch.equal(again.w, WHOLE))
    weights = WHOLE[2 * rank : 2 * rank + 2].clone()
    state = {"state": {"w": declared(weights, ((2 * rank, 0), (0, 0), (2, 6)))}}
    for step in range(3):  # the last walk's results must not be taken over
        at = 2 * (rank if step < 2 else 1 - rank)
        declared(weights, ((at, 0), (0, 0), (2, 6)))
        reknit.save(f"{folder}/{step}", state)
        got = torch.zeros(4, 6)
        reknit.load(f"{folder}/{step}", {"state": {"w": got}})
        right.append(torch.equal(got, WHOLE if step < 2 else WHOLE.roll(2, 0)))
    return right


def test_parts_are_found_in_every_place_of_a_state_and_after_they_have_changed(tmp_path: Path) -> None:
    assert run(2, elsewhere, str(tmp_path)) == [[True] * 7] * 2


def not_one_tensor(folder: str) -> list[str]:
    """Return the errors for ranks whose parts together have a hole, or overlap with other values."""
    rank, texts = dist.get_rank(), []
    hole = declared(torch.ones(1, 6), ((2 * rank, 0), (0, 0), (1, 6)))
    torn = declared(torch.full((3, 6), float(rank)), ((rank, 0), (0, 0), (3, 6)))
    for name, value in (("hole", hole), ("torn", torn)):
        with pytest.raises(ReknitError) as raised:
            reknit.save(f"{folder}/{name}", {"state": {"w": value}})
        texts.append(str(raised.value))
    shared = declared(torch.ones(200, 600), ((0, 0), (0, 0), (200, 600)), shape=(200, 600))
    report = reknit.save(f"{folder}/shared", {"state": {"w": shared}}).result()
    return [*texts, str(report.total_nbytes)]


def test_parts_of_ranks_that_are_not_one_tensor_are_refused_and_equal_parts_stored_once(
    tmp_path: Path,
) -> None:
    for hole, torn, nbytes in run(2, not_one_tensor, str(tmp_path)):
        assert "state/w" in hole
        assert "state/w" in torn
        assert int(nbytes) < 2 * 4 * 200 * 600


@table(
    ("declaration", "problem"),
    [
        (((4, 6), ((0, 0),), ((0, 0),), ()), "local_sizes has 0 entries"),
        (((4, 6), ((0, 0), (1, 0)), ((0, 0),), ((2, 6),)), "global_offsets has 2 entries"),
        (((24,), ((0,),), ((0,),), ((12,),)), "the tensor has 2 dimensions, and global_shape 1"),
        (((4, 6), ((0,),), ((0, 0),), ((2, 6),)), "part 0 has global_offsets (0,)"),
        (((4, 6), ((0, 0),), ((0,),), ((2, 6),)), "part 0 has local_offsets (0,)"),
        (((4, 6), ((3, 0),), ((0, 0),), ((2, 6),)), "is not inside (4, 6)"),
        (((4, 6), ((-1, 0),), ((0, 0),), ((2, 6),)), "is not inside (4, 6)"),
        (((9, 6), ((0, 0),), ((0, 0),), ((3, 6),)), "is not inside (2, 6)"),
        (((4, 6), ((0, 0), (0, 5)), ((0, 0), (1, 0)), ((1, 6), (1, 1))), "parts 0 and 1 have elements"),
        (((4, 6), ((0, 0), (1, 0)), ((0, 0), (0, 5)), ((1, 6), (1, 1))), "parts 0 and 1 have elements"),
        (((4, 6.5), ((0, 0),), ((0, 0),), ((2, 6),)), "not tuples of integers"),
        (((4, 6), (0, 0), ((0, 0),), ((2, 6),)), "not tuples of integers"),
        ((None, None, None, None), "not tuples of integers"),
    ],
)
def test_impossible_parts_are_refused_with_the_name_of_the_tensor(declaration: Any, problem: str) -> None:
    value = torch.zeros(2, 6)
    for name, one in zip(NAMES, declaration, strict=True):
        setattr(value, name, one)
    for walk in (lambda: collect({"state": {"w": value}}, 0, 1), lambda: to_fill(value)):
        with pytest.raises(StateError, match="state/w declares parts") as raised:
            walk()
        assert problem in str(raised.value)


def to_fill(value: Any) -> None:
    checkpoint = assemble([portable(collect({"state": {"w": WHOLE}}, 0, 1))])
    fill(wanted({"state": {"w": value}}, checkpoint.catalog(), 0, 1), checkpoint)


def test_one_memory_with_two_declarations_is_two_tensors() -> None:
    memory = WHOLE[:2].clone()
    top, bottom = memory.view(2, 6), memory.view(2, 6)
    declared(top, ((0, 0), (0, 0), (2, 6)), shape=(2, 6))
    declared(bottom, ((0, 0), (0, 0), (1, 6)), ((1, 0), (1, 0), (1, 6)), shape=(2, 6))
    narrow = declared(memory.view(2, 6), ((0, 0), (1, 0), (1, 6)), shape=(1, 6))
    held = collect({"state": {"top": top, "bottom": bottom, "narrow": narrow, "plain": memory}}, 0, 1)
    assert [(alias.fqn, alias.of) for alias in held.aliases] == []
    checkpoint = assemble([portable(held)])
    assert torch.equal(checkpoint.tensors["state", "narrow"], WHOLE[1:2])
    for name in ("top", "bottom", "plain"):
        assert torch.equal(checkpoint.tensors["state", name], WHOLE[:2])
