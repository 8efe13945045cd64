"""The options of a load: they choose names, shapes and dtypes, and decide when the load is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

import reknit
from reknit.engine.memory.elements import convert
from reknit.engine.stored.opening import opened, read_opened
from reknit.engine.stored.verify import check_all
from reknit.errors import StorageNotFoundError
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from reknit.types.dtype import ITEMSIZE, converts, numpy_dtype
from reknit.types.manifest import FileEntry
from tests.ranks import run
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory
from tests.torchrun import pieces

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


def test_options_that_make_no_sense_are_refused_at_once() -> None:
    cases: list[dict[str, Any]] = [
        {"only": "model/*"},
        {"only": (1,)},
        {"only": ("",)},
        {"allow_shape_mismatch": "model/*"},
        {"allow_shape_mismatch": None},
        {"verify": "all"},
    ]
    for wrong in cases:
        with pytest.raises(reknit.UsageError, match=next(iter(wrong))):
            reknit.LoadOptions(**wrong)


# Only some names.


class Average:
    """An object with tensors and a number in its state dict."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {"a": torch.full((2,), value), "b": torch.full((2,), value), "n": value}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"body": {"w": np.full(4, value), "b": np.full(2, value)}, "head": np.full(3, value)},
        "average": Average(value),
        "extra": {"epoch": int(value), "mine": reknit.PerRank([value])},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    reknit.save(tmp_path / "x", state(1.0))
    return tmp_path / "x"


def load_only(path: Path, *only: str, **more: Any) -> tuple[dict[str, Any], reknit.LoadReport]:
    target = state(0.0)
    return target, reknit.load(path, target, options=reknit.LoadOptions(only=only), **more)


def test_just_what_the_patterns_match_is_loaded(path: Path) -> None:
    target, report = load_only(path, "model/body/*", "extra/epoch")
    assert target["model"]["body"]["w"].tolist() == [1] * 4
    assert not target["model"]["head"].any()
    assert target["extra"]["epoch"] == 1
    assert target["extra"]["mine"].value == [0.0]
    assert target["average"].state["n"] == 0
    assert set(report.restored) == {"model/body/w", "model/body/b", "extra/epoch"}
    assert report.missing == report.unexpected == ()
    assert report.mismatched == report.notes == {}


def test_what_the_patterns_leave_out_may_differ_in_every_way(path: Path) -> None:
    target = state(0.0)
    target["model"] |= {"head": np.zeros(9, np.int8), "new": np.zeros(1)}
    del target["extra"]["epoch"]
    target["ema"] = {"w": np.zeros(3)}
    reknit.load(path, target, options=reknit.LoadOptions(only=("model/body/*",)))
    assert target["model"]["body"]["b"].tolist() == [1, 1]


def test_what_the_patterns_match_is_as_strict_as_ever(path: Path) -> None:
    target = state(0.0)
    target["model"]["body"] = {"w": np.zeros(5), "new": np.zeros(1)}
    with pytest.raises(reknit.MismatchError, match="in 3 places") as caught:
        reknit.load(path, target, options=reknit.LoadOptions(only=("model/body/*",)))
    for line in ("mismatched: model/body/w", "missing: model/body/new", "unexpected: model/body/b"):
        assert line in caught.value.message


def test_a_pattern_that_matches_nothing_is_taken_for_a_typo(path: Path) -> None:
    for strict in (True, False, ["!modle/*", "!model/*"]):
        with pytest.raises(
            reknit.MismatchError, match=r"only: the pattern 'modle/\*' matches nothing"
        ) as caught:
            load_only(path, "model/body/*", "modle/*", strict=strict)
        assert "did you mean 'model/*'?" in caught.value.message


def test_an_object_takes_those_parts_of_its_state_that_match_and_keeps_the_others(path: Path) -> None:
    target, _ = load_only(path, "average/a")
    found = target["average"].state
    assert (found["a"].tolist(), found["b"].tolist(), found["n"]) == ([1, 1], [0, 0], 0)
    target, _ = load_only(path, "average/~s")
    found = target["average"].state
    assert (found["a"].tolist(), found["b"].tolist(), found["n"]) == ([0, 0], [0, 0], 1)
    target, _ = load_only(path, "average/*")
    found = target["average"].state
    assert (found["a"].tolist(), found["b"].tolist(), found["n"]) == ([1, 1], [1, 1], 1)


def test_a_pattern_that_one_rank_has_use_for_is_no_typo() -> None:
    ProcessMemory.clear("some")

    def rank(group: Group) -> list[float]:
        saved = {"m": {f"w{group.rank}": np.ones(2), "b": np.ones(2)}}
        reknit.save("process://some", saved, group=group)
        target = {"m": {f"w{group.rank}": np.zeros(2), "b": np.zeros(2)}}
        options = reknit.LoadOptions(only=("m/w1",), timeout_s=30)
        reknit.load("process://some", target, group=group, options=options)
        return [float(array.sum()) for array in target["m"].values()]

    assert run_ranks(2, rank) == [[0, 0], [2, 0]]


def trained(num_words: int, *, steps: int = 1, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    model = nn.ModuleDict({"embed": nn.Embedding(num_words, 4), "out": nn.Linear(4, 2)})
    optimizer = kind(model.parameters(), lr=0.5)
    for _ in range(steps):
        model["out"](model["embed"](torch.arange(num_words))).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_states_of_an_optimizer_can_be_left_as_they_are_one_by_one(tmp_path: Path) -> None:
    model, optimizer = trained(6, steps=2)
    reknit.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    target, other = trained(6)
    kept = other.state[target["out"].bias]["exp_avg_sq"].clone()  # type: ignore[index]
    other.param_groups[0]["lr"] = 0.25
    only = reknit.LoadOptions(only=("optimizer/state/*/exp_avg", "optimizer/state/out.bias/step"))
    report = reknit.load(tmp_path / "x", {"model": target, "optimizer": other}, options=only)
    ours, theirs = other.state[target["out"].bias], optimizer.state[model["out"].bias]  # type: ignore[index]
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    assert torch.equal(ours["exp_avg_sq"], kept)
    assert ours["step"] == 2
    assert other.state[target["out"].weight]["step"] == 1  # type: ignore[index]
    assert other.param_groups[0]["lr"] == 0.25
    assert len(report.restored) == 4


# Another shape.


def test_a_vocabulary_of_another_size_takes_what_both_have(tmp_path: Path) -> None:
    for fresh in (True, False):
        for saved, here in ((6, 9), (9, 6)):
            folder = tmp_path / f"{saved} {fresh}"
            common = min(saved, here)
            torch.manual_seed(0)
            model, optimizer = trained(saved)
            reknit.save(folder / "x", {"model": model, "optimizer": optimizer})
            target, other = trained(here, steps=0 if fresh else 1)
            weight: Any = target["embed"].weight  # type: ignore[index]
            kept = weight[common:].detach().clone()
            before = torch.zeros(here, 4) if fresh else other.state[weight]["exp_avg"].clone()
            with pytest.raises(reknit.MismatchError, match="its parameter has the shape"):
                reknit.load(folder / "x", {"model": target, "optimizer": other})
            report = reknit.load(
                folder / "x",
                {"model": target, "optimizer": other},
                options=reknit.LoadOptions(allow_shape_mismatch=("model/embed.*",)),
            )
            source: Any = model["embed"].weight  # type: ignore[index]
            assert torch.equal(weight[:common], source[:common]), fresh
            assert torch.equal(weight[common:], kept), fresh
            assert other.state[weight]["exp_avg"].shape == (here, 4), fresh
            assert torch.equal(
                other.state[weight]["exp_avg"][:common], optimizer.state[source]["exp_avg"][:common]
            ), fresh
            assert torch.equal(other.state[weight]["exp_avg"][common:], before[common:]), fresh
            assert other.state[weight]["step"] == 1, fresh
            names = {
                "model/embed.weight",
                "optimizer/state/embed.weight/exp_avg",
                "optimizer/state/embed.weight/exp_avg_sq",
            }
            assert set(report.mismatched) == names, fresh
            assert report.mismatched["model/embed.weight"] == (
                f"saved shape [{saved}, 4], wanted [{here}, 4]: took [0:{common},0:4]"
            ), fresh
            assert not names & {*report.restored, *report.resharded, *report.unexpected, *report.missing}, (
                fresh
            )
            assert "optimizer/state/embed.weight/step" in report.restored, fresh
            other.step()


def test_any_name_of_a_tied_parameter_lets_its_states_differ_too(tmp_path: Path) -> None:
    for parallel in (True, False):
        for tied_when_saved in (True, False):
            folder = tmp_path / f"{tied_when_saved} {parallel}"
            folder.mkdir()

            def tied(num_words: int) -> Any:
                model = nn.ModuleDict({"embed": nn.Embedding(num_words, 4)})
                model["head"] = nn.Linear(4, num_words, bias=False)
                model["head"].weight = model["embed"].weight
                return model

            model = tied(6)
            weight = model["embed"].weight
            optimizer = torch.optim.AdamW([("embed.weight", weight)])
            model["head"](model["embed"](torch.arange(6))).sum().backward()
            optimizer.step()
            saved = model if tied_when_saved else {"head.weight": weight.detach()}
            reknit.save(folder / "x", {"model": saved, "optimizer": optimizer})
            target = tied(9)
            here = target["embed"].weight
            other = torch.optim.AdamW(target.parameters())
            state = {"model": nn.DataParallel(target).cpu() if parallel else target, "optimizer": other}
            with pytest.raises(reknit.MismatchError, match="its parameter has the shape"):
                reknit.load(folder / "x", state)
            options = reknit.LoadOptions(allow_shape_mismatch=("model/head.weight",))
            reknit.load(folder / "x", state, options=options)
            ours, theirs = other.state[here], optimizer.state[weight]
            assert torch.equal(here[:6], weight), parallel
            assert torch.equal(ours["exp_avg"][:6], theirs["exp_avg"]), parallel
            assert ours["exp_avg"].shape == (9, 4), parallel
            assert not ours["exp_avg"][6:].any(), parallel
            assert ours["step"] == theirs["step"], parallel


def test_states_shorter_than_their_parameter_follow_its_shape(tmp_path: Path) -> None:
    def build(num_words: int, steps: int) -> tuple[nn.Module, Any]:
        return trained(num_words, steps=steps, kind=torch.optim.Adafactor)

    model, optimizer = build(6, 1)
    reknit.save(tmp_path / "x", {"model": model, "optimizer": optimizer})
    target, other = build(9, 0)
    options = reknit.LoadOptions(allow_shape_mismatch=("*",))
    reknit.load(tmp_path / "x", {"model": target, "optimizer": other}, options=options)
    weight: Any = target["embed"].weight  # type: ignore[index]
    theirs = optimizer.state[model["embed"].weight]  # type: ignore[index]
    assert {name: tuple(tensor.shape) for name, tensor in other.state[weight].items()} == {
        "step": (),
        "row_var": (9, 1),
        "col_var": (1, 4),
    }
    assert torch.equal(other.state[weight]["row_var"][:6], theirs["row_var"])
    assert torch.equal(other.state[weight]["col_var"], theirs["col_var"])


def test_an_optimizer_without_its_model_says_itself_that_shapes_may_differ(tmp_path: Path) -> None:
    model, _ = trained(6, steps=0)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model["out"](model["embed"](torch.arange(6))).sum().backward()  # type: ignore[index]
    optimizer.step()
    reknit.save(tmp_path / "x", {"optimizer": optimizer})
    target, _ = trained(9, steps=0)
    other = torch.optim.AdamW(target.named_parameters())
    options = reknit.LoadOptions(allow_shape_mismatch=("optimizer/state/embed.weight/*",))
    reknit.load(tmp_path / "x", {"optimizer": other}, options=options)
    found = other.state[target["embed"].weight]["exp_avg"]  # type: ignore[index]
    assert found.shape == (9, 4)
    assert not found[6:].any()
    assert found[:6].any()


def test_another_number_of_dimensions_is_a_mismatch_all_the_same(path: Path) -> None:
    target = {"model": state(0.0)["model"] | {"head": np.zeros((3, 1))}}
    with pytest.raises(reknit.MismatchError, match="the number of dimensions may not differ"):
        reknit.load(path, target, options=reknit.LoadOptions(allow_shape_mismatch=("*",)))


def test_shapes_that_have_nothing_in_common_are_reported_and_nothing_else(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"w": np.zeros((0, 3))})
    target = {"w": np.ones((2, 3))}
    report = reknit.load(tmp_path / "x", target, options=reknit.LoadOptions(allow_shape_mismatch=("w",)))
    assert target["w"].all()
    assert report.mismatched == {"w": "saved shape [0, 3], wanted [2, 3]: took [0:0,0:3]"}
    assert report.restored == report.unexpected == ()


def resized(path: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Save a sharded model and its optimizer, and load both into larger ones on another mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build(num_words: int) -> tuple[Any, Any]:
        torch.manual_seed(num_words)
        model = nn.Sequential(nn.Embedding(num_words, 4), nn.Linear(4, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model(torch.arange(num_words)).square().sum().backward()
        return model, optimizer

    model, optimizer = build(7)
    optimizer.step()
    reknit.save(path, {"model": model, "optimizer": optimizer})
    target, other = build(11)
    kept = pieces.whole(target[0].weight)[7:]
    options = reknit.LoadOptions(allow_shape_mismatch=("model/0.*",))
    report = reknit.load(path, {"model": target, "optimizer": other}, options=options)
    whole = pieces.whole(target[0].weight)
    moment = pieces.whole(other.state[target[0].weight]["exp_avg"])
    saved = pieces.whole(optimizer.state[model[0].weight]["exp_avg"])
    return (
        torch.equal(whole[:7], pieces.whole(model[0].weight)) and torch.equal(whole[7:], kept),
        torch.equal(moment[:7], saved) and not moment[7:].any(),
        tuple(report.mismatched),
    )


def test_shards_of_a_larger_vocabulary_take_what_both_have(tmp_path: Path) -> None:
    for weight, moment, mismatched in run(3, resized, str(tmp_path / "x")):
        assert weight
        assert moment
        assert "optimizer/state/0.weight/exp_avg" in mismatched


# Another dtype.

FLOATS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
LARGEST = 448.0
"""The largest number of float8_e4m3fn: larger numbers become NaN in some versions of torch."""


def converted(source: np.ndarray[Any, Any], name: str, target: str) -> tuple[bytes, bytes]:
    """Load an array into a target of NumPy and one of torch, and return the bytes of both."""
    raw = np.ascontiguousarray(source).view(np.uint8)
    array = np.empty(source.shape, numpy_dtype(target))
    tensor = torch.empty(source.shape, dtype=getattr(torch, target))
    for into in (array, tensor):
        convert(raw, name, source.shape, (source.itemsize,), into)
    return array.tobytes(), bytes(tensor.view(torch.uint8).numpy().tobytes())


NUMBERS = st.one_of(
    st.floats(-LARGEST, LARGEST, width=64),
    st.floats(-1e-6, 1e-6, width=64),
    # Halfway between two numbers of a narrower type, and just beside that.
    st.builds(
        lambda n, bits, off: n * 2.0**-bits + off * 2.0**-40,
        st.integers(-4097, 4097),
        st.integers(4, 24),
        st.integers(-1, 1),
    ),
)


@settings(max_examples=examples(200))
@example([1 + 2**-11 + 2**-40], "float64", "float16")  # rounding twice would give another result
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.sampled_from(FLOATS), st.sampled_from(FLOATS))
def test_numpy_and_torch_targets_get_the_same_bits(numbers: list[float], name: str, target: str) -> None:
    with np.errstate(over="ignore"):
        source = np.clip(np.array(numbers), -LARGEST, LARGEST).astype(np.float32).astype(numpy_dtype(name))
        if name == "float64":
            source = np.array(numbers)
    if not np.isfinite(source.astype(np.float64)).all():
        return
    if "fnuz" in target and np.abs(source.astype(np.float64)).max() > 200:
        return  # the largest number of float8_e4m3fnuz is 240
    array, tensor = converted(source, name, target)
    assert array == tensor


INTEGERS = [name for name in ITEMSIZE if "int" in name]


@settings(max_examples=examples(100))
@given(st.data(), st.sampled_from([*INTEGERS, "bool"]))
def test_integers_become_the_same_numbers_in_both(data: st.DataObject, name: str) -> None:
    dtype = np.dtype(name)
    low, high = (0, 1) if name == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    source = np.array(data.draw(st.lists(st.integers(int(low), int(high)), min_size=1, max_size=9)), dtype)
    for target in [*INTEGERS, "float64", "float32", "bfloat16"]:
        if target != name and converts(name, target):
            array, tensor = converted(source, name, target)
            assert array == tensor
            if target in INTEGERS:
                assert np.frombuffer(array, target).tolist() == source.tolist(), "exact"


def test_ties_go_to_the_even_number_and_wider_types_have_the_value_exactly(tmp_path: Path) -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], np.float32)
    reknit.save(tmp_path / "x", {"w": ties})
    rounded = {"w": np.zeros(3, ml_dtypes.bfloat16)}
    report = reknit.load(tmp_path / "x", rounded, options=reknit.LoadOptions(cast=True))
    assert rounded["w"].tolist() == [1, 1 + 2**-6, -1]
    assert report.cast == ("w",)
    reknit.save(tmp_path / "y", rounded)
    wide = {"w": torch.zeros(3, dtype=torch.float64)}
    reknit.load(tmp_path / "y", wide, options=reknit.LoadOptions(cast=True))
    assert wide["w"].tolist() == [1, 1 + 2**-6, -1]


def test_what_is_too_large_becomes_infinite_or_the_largest_number(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"w": np.array([1e9, -1e9])})
    for dtype, largest in (("float16", np.inf), ("float8_e5m2", np.inf), ("float8_e4m3fn", LARGEST)):
        target = {"w": np.zeros(2, numpy_dtype(dtype))}
        reknit.load(tmp_path / "x", target, options=reknit.LoadOptions(cast=True))
        assert target["w"].astype(np.float64).tolist() == [largest, -largest]


def test_a_conversion_that_would_lose_more_than_rounding_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, str]] = [
        ("float32", "int64"),
        ("int64", "int32"),
        ("complex64", "float32"),
        ("int8", "bool"),
    ]
    for saved, wanted in cases:
        folder = tmp_path / saved
        folder.mkdir()
        reknit.save(folder / "x", {"w": np.ones(3, saved)})
        for target in (np.zeros(3, wanted), torch.zeros(3, dtype=getattr(torch, wanted))):
            with pytest.raises(reknit.MismatchError, match="would lose more than rounding"):
                reknit.load(folder / "x", {"w": target}, options=reknit.LoadOptions(cast=True))
            assert not target.any(), saved


# An error names everything that does not fit, before anything changes.


def damage(path: Path) -> list[str]:
    """Truncate one data file and delete another; return their names in the checkpoint."""
    files = sorted(path.glob("model/*.safetensors"))
    short, gone = files[:2]
    short.write_bytes(short.read_bytes()[:-1])
    gone.unlink()
    return [file.relative_to(path).as_posix() for file in (short, gone)]


def test_ranks_tell_all_that_does_not_fit_and_all_that_is_damaged_in_one_error(tmp_path: Path) -> None:
    path, size = tmp_path / "x", 3

    def save(group: Group) -> None:
        parts = {f"w{group.rank}": np.ones(5000), "shape": np.ones(4), "dtype": np.ones(4), "left": 1}
        reknit.save(path, {"model": parts}, group=group)

    run_ranks(size, save)
    names = damage(path)
    targets: list[dict[str, Any]] = [
        {
            f"w{rank}": np.zeros(5000),
            "shape": np.zeros(5),
            "dtype": np.zeros(4, np.float32),
            f"new{rank}": np.zeros(1),
        }
        for rank in range(size)
    ]
    messages: list[str] = [""] * size

    def load(group: Group) -> None:
        options = reknit.LoadOptions(timeout_s=30)
        with pytest.raises(reknit.CorruptError) as caught:
            reknit.load(path, {"model": targets[group.rank]}, group=group, options=options)
        messages[group.rank] = caught.value.message

    run_ranks(size, load)
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert "in 8 places; nothing was changed" in lines[0]
    assert lines[1].startswith("  damaged: ")
    for line in (
        f"damaged: {names[0]} has",
        f"damaged: {names[1]} is missing",
        "mismatched: model/shape: ",
        "mismatched: model/dtype: ",
        "missing: model/new0: the checkpoint does not have it (rank 0)",
        "missing: model/new1: the checkpoint does not have it (rank 1)",
        "missing: model/new2: the checkpoint does not have it (rank 2)",
        "unexpected: model/left: saved, but no rank wants it",
    ):
        assert line in messages[0]
    assert not any(array.any() for target in targets for array in target.values())


def refused(path: str) -> tuple[str, bool]:
    """Load a tensor that fits none of the real ranks, and return the error."""
    rank = torch.distributed.get_rank()
    target = {"w": torch.zeros(2 + rank), "v": torch.zeros(6)}
    try:
        reknit.load(path, {"model": target})
    except reknit.ReknitError as error:
        return f"{type(error).__name__}: {error.message}", not any(t.any() for t in target.values())
    return "", False


def test_real_ranks_raise_the_same_error_before_anything_changes(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"model": {"w": torch.ones(3), "v": torch.ones(6)}})
    (one, unchanged), (two, also) = run(2, refused, str(tmp_path / "x"))
    assert one == two
    assert one.startswith("MismatchError: ")
    assert re.search(r"model/w: its shape is \[3\] in the checkpoint and \[2\] here .*\(rank 0\)", one)
    assert unchanged
    assert also
    (file,) = (tmp_path / "x").glob("model/*.safetensors")
    file.unlink()
    (one, unchanged), (two, also) = run(2, refused, str(tmp_path / "x"))
    assert one == two
    assert one.startswith("CorruptError: ")
    assert "is missing" in one
    assert "model/w" in one
    assert unchanged
    assert also


def test_a_read_that_fails_says_that_the_target_is_partly_written_only_where_a_byte_of_it_was(
    tmp_path: Path,
) -> None:
    class Failing(LocalStorage):
        failure: reknit.ReknitError

        def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
            if path.startswith("model/"):
                raise self.failure
            super().read_into(path, start, buffers)

    register("failing-read", lambda url, _: Failing(url.removeprefix("failing-read://")))
    small, large = tmp_path / "small", tmp_path / "large"
    reknit.save(small, state(1.0))
    reknit.save(large, {"model": np.zeros(1 << 15)})  # it is read straight into the target
    gone = reknit.StorageError("the disk is gone")
    lost = StorageNotFoundError("the store has lost it")
    target = state(0.0)
    for path, wanted, failure, said in (
        (small, target, gone, "the disk is gone; reknit had changed no tensor of the target yet"),
        (small, {"model": target["model"]}, gone, "the disk is gone; reknit had changed no tensor"),
        (large, {"model": np.ones(1 << 15)}, lost, "has lost it; reknit had changed no tensor"),
        (large, {"model": np.ones(1 << 15)}, gone, "the disk is gone; the target is partly written"),
    ):
        Failing.failure = failure
        with pytest.raises(reknit.StorageError, match=said):
            reknit.load(f"failing-read://{path}", wanted)
        failure.message = failure.message.partition(";")[0]
    assert (target["extra"]["epoch"], target["extra"]["mine"].value) == (0, [0.0])


# Every byte first.


def test_a_full_check_finds_damage_that_a_load_would_not_touch(path: Path) -> None:
    (file,) = path.glob("average/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    target = {"model": state(0.0)["model"]}
    reknit.load(path, target)
    target = {"model": state(0.0)["model"] | {"head": np.zeros(5)}}
    with pytest.raises(reknit.CorruptError, match=r"damaged: bytes 0:\d+ of average/") as caught:
        reknit.load(path, target, strict=False, options=reknit.LoadOptions(verify="full"))
    assert "nothing was changed" in caught.value.message
    assert not target["model"]["body"]["w"].any()
    file.unlink()
    with pytest.raises(reknit.CorruptError, match="is missing"):
        reknit.load(path, target, options=reknit.LoadOptions(verify="full"))


def test_a_full_check_of_a_sound_checkpoint_loads_it(path: Path) -> None:
    target = state(0.0)
    report = reknit.load(path, target, options=reknit.LoadOptions(verify="full"))
    assert target["model"]["head"].tolist() == [1, 1, 1]
    assert {phase.phase for phase in report.phases} >= {"verify", "read"}


def test_ranks_divide_a_full_check_by_bytes_and_leave_no_block_out(tmp_path: Path) -> None:
    large = np.zeros(5 << 20, np.uint8)
    reknit.save(
        tmp_path / "x", {"a": {"w": large}, "b": {f"v{n}": np.ones(n) for n in range(9)}, "c": {"n": 1}}
    )
    storage = LocalStorage(tmp_path / "x")
    checkpoint = opened(storage, read_opened(storage, None), None, reknit.LoadOptions())
    read: list[tuple[int, str, int, int]] = []

    class Watched(LocalStorage):
        rank = 0

        def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
            read.append((self.rank, path, start, sum(buffer.nbytes for buffer in buffers)))
            super().read_into(path, start, buffers)

    watched = checkpoint.source = Watched(tmp_path / "x")
    for size in (1, 2, 3, 7):
        read.clear()
        for rank in range(size):
            watched.rank = rank
            assert check_all(checkpoint, rank, size, reknit.LoadOptions()) == []
        for file in checkpoint.manifest.files:
            ranges = sorted((start, nbytes) for _, path, start, nbytes in read if path == file.path)
            assert sum(nbytes for _, nbytes in ranges) == file.nbytes
            assert [start for start, _ in ranges] == [
                sum(n for _, n in ranges[:k]) for k in range(len(ranges))
            ]
        if size == 2:
            assert {rank for rank, *_ in read} == {0, 1}


def test_a_file_without_bytes_is_in_the_share_of_one_rank(tmp_path: Path) -> None:
    reknit.save(tmp_path / "x", {"a": {"w": np.ones(100)}})
    storage = LocalStorage(tmp_path / "x")
    checkpoint = opened(storage, read_opened(storage, None), None, reknit.LoadOptions())
    empty = [FileEntry(name, 0, ()) for name in ("a/first", "a/last")]
    files = (empty[0], *checkpoint.manifest.files, empty[1])
    checkpoint.manifest = replace(checkpoint.manifest, files=files)
    for size in (1, 2, 5):
        reported = [
            line for rank in range(size) for line in check_all(checkpoint, rank, size, reknit.LoadOptions())
        ]
        assert sorted(reported) == ["a/first is missing", "a/last is missing"]


@pytest.mark.parametrize("size", [1, 3])
def test_damage_in_any_file_is_found_by_some_rank_and_raised_by_all(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"

    def save(group: Group) -> None:
        parts = {"model": {f"w{group.rank}": np.ones(3000)}, "mine": reknit.PerRank([group.rank]), "n": 1}
        reknit.save(path, parts, group=group)

    def load(group: Group) -> str:
        target = {"model": {f"w{group.rank}": np.zeros(3000)}}
        options = reknit.LoadOptions(verify="full", timeout_s=30)
        with pytest.raises(reknit.CorruptError) as caught:
            reknit.load(path, target, group=group, options=options)
        assert not target["model"][f"w{group.rank}"].any()
        return str(caught.value)

    run_ranks(size, save)
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"):
        pristine = file.read_bytes()
        file.write_bytes(pristine[:-1] + bytes([pristine[-1] ^ 1]))
        for message in run_ranks(size, load):
            assert file.name in message
        file.write_bytes(pristine)
