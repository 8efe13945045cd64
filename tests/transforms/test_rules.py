"""Rules, against whole tensors that NumPy or torch puts together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import reknit
from reknit import transforms as t
from reknit.errors import MismatchError, UsageError
from reknit.testing.world import run_ranks
from reknit.transforms.apply import Transformed
from reknit.transforms.base import Interleaving
from reknit.types.box import Box
from reknit.types.manifest import Catalog
from reknit.types.shard import Shard, TensorSpec
from reknit.types.wanted import Wanted
from tests.running.examples import examples
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

Array = NDArray[Any]


def numbered(*shape: int, first: int = 0) -> Array:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def catalog(tensors: dict[str, Array], values: dict[str, Any] | None = None, item: str = "model") -> Catalog:
    specs = {fqn: TensorSpec(array.shape, array.dtype.name) for fqn, array in tensors.items()}
    return Catalog((item,), {item: specs}, {item: values or {}}, {}, lambda *_: {})


def read(rules: list[t.Rule], saved: dict[str, Array], name: str, box: Box | None = None) -> Array:
    """Return a box of a target as a load fills it: from boxes of the saved tensors."""
    transformed = Transformed.of(rules, catalog(saved))
    spec = transformed.catalog.tensors["model"][name]
    box = box or Box.whole(spec.shape)
    # Not contiguous, so that a copy in the place of a view would show.
    data = np.full([2 * n for n in box.lengths], -1, np.int32)[tuple(slice(0, 2 * n, 2) for n in box.lengths)]
    wanted = transformed.back(Wanted(("model",), (Shard("model", name, spec, box, None, data),)))
    for shard in wanted.shards:
        assert shard.spec.shape == saved[shard.fqn].shape
        assert shard.box.fits(shard.spec.shape)
        shard.data[...] = saved[shard.fqn][shard.box.slices()]
    wanted.deliver()
    return data


def offered(rules: list[t.Rule], saved: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    return {
        n: spec.shape for n, spec in Transformed.of(rules, catalog(saved)).catalog.tensors["model"].items()
    }


def test_a_name_with_fields_becomes_another_and_the_rest_stays() -> None:
    saved = {"layers.0.w": numbered(2, 3), "layers.11.w": numbered(2, 3, first=6), "head": numbered(4)}
    rules = [t.rename("layers.{i}.w", "blocks.{i}.weight")]
    assert offered(rules, saved) == {"blocks.0.weight": (2, 3), "blocks.11.weight": (2, 3), "head": (4,)}
    assert (read(rules, saved, "blocks.11.weight") == saved["layers.11.w"]).all()
    assert (read(rules, saved, "head") == saved["head"]).all()


def test_a_field_is_one_part_of_a_name_and_with_a_star_several() -> None:
    saved = {"a.b.c": numbered(1), "a.c": numbered(1)}
    assert offered([t.rename("{x}.c", "{x}.d")], saved) == {"a.b.c": (1,), "a.d": (1,)}
    assert offered([t.rename("{x*}.c", "{x*}.d")], saved) == {"a.b.d": (1,), "a.d": (1,)}


def test_names_may_change_places() -> None:
    saved = {"a.x": numbered(2), "b.x": numbered(2, first=5)}
    rules = [t.rename("a.x", "c"), t.rename("b.x", "a.x"), t.rename("c", "b.x")]
    assert (read(rules, saved, "a.x") == saved["b.x"]).all()
    assert (read(rules, saved, "b.x") == saved["a.x"]).all()


def test_experts_are_stacked_in_the_order_of_their_numbers() -> None:
    saved = {f"e.{n}.w": numbered(2, 3, first=6 * n) for n in range(12)}
    rules = [t.stack("e.{n}.w", "w", over="n", dim=1)]
    assert (read(rules, saved, "w") == np.stack([saved[f"e.{n}.w"] for n in range(12)], 1)).all()


def test_two_halves_of_each_head_become_pairs_and_halves_again() -> None:
    heads, half = 3, 4
    halves = numbered(heads * 2 * half, 5)
    pairs = halves.reshape(heads, 2, half, 5).swapaxes(1, 2).reshape(-1, 5)
    assert (read([t.interleave("q", repeat=heads)], {"q": halves}, "q") == pairs).all()
    assert (read([t.deinterleave("q", "p", repeat=heads)], {"q": pairs}, "p") == halves).all()
    columns = numbered(2, 3, 6)
    taken = np.concatenate([columns[..., ::2], columns[..., 1::2]], -1)
    assert (read([t.deinterleave("w", dim=2)], {"w": columns}, "w") == taken).all()


@settings(max_examples=examples(200))
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_a_range_of_interleaved_parts_needs_only_the_groups_that_it_is_in(
    groups: int, parts: int, length: int, apart: bool, data: st.DataObject
) -> None:
    size = parts * length
    start = data.draw(st.integers(0, groups * size - 1))
    stop = data.draw(st.integers(start + 1, groups * size))
    rule = (t.deinterleave if apart else t.interleave)("w", parts=parts, repeat=groups)
    shape = (length, parts) if apart else (parts, length)
    saved = numbered(groups * size)
    whole = saved.reshape(groups, *shape).swapaxes(1, 2).reshape(-1)
    assert (read([rule], {"w": saved}, "w", Box((start,), (stop - start,))) == whole[start:stop]).all()
    first, last = Interleaving(0, parts, length, apart).needed(start, stop)
    assert first >= start // size * size
    assert last <= -(-stop // size) * size


def test_padding_is_zero_and_trimming_leaves_the_end_out() -> None:
    saved = {"w": numbered(4, 3, first=1)}
    padded = read([t.pad("w", 6)], saved, "w")
    assert (padded[:4] == saved["w"]).all()
    assert not padded[4:].any()
    assert (read([t.trim("w", 2, dim=1)], saved, "w") == saved["w"][:, :2]).all()


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[t.Rule], dict[str, Array], dict[str, Array]]:
    """Draw rules, saved tensors, and the result of the rules, put together by NumPy."""
    rows, columns, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    repeat = draw(st.integers(1, 3))
    parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    length = rows * repeat * sum(parts)
    now = {f"l.{n}.w": numbered(length, columns, first=1 + n * length * columns) for n in range(layers)}
    saved, rules = dict(now), []
    if draw(st.booleans()):
        names = [f"l.{{n}}.p{k}" for k in range(len(parts))]
        rules.append(t.split("l.{n}.w", names, parts=parts, repeat=repeat))
        for n in range(layers):
            runs = np.split(now.pop(f"l.{n}.w").reshape(repeat, -1, columns), np.cumsum(parts[:-1]) * rows, 1)
            now |= {f"l.{n}.p{k}": run.reshape(-1, columns) for k, run in enumerate(runs)}
        if draw(st.booleans()):
            rules.append(t.fuse(names[::-1], "l.{n}.w", parts=parts[::-1]))
            for n in range(layers):
                now[f"l.{n}.w"] = np.concatenate([now.pop(f"l.{n}.p{k}") for k in range(len(parts))][::-1])
    if draw(st.booleans()):
        divisors = [n for n in range(1, 13) if all(len(array) % n == 0 for array in now.values())]
        groups = draw(st.sampled_from(divisors))
        halves = draw(
            st.sampled_from([n for n in divisors if all(len(a) % (groups * n) == 0 for a in now.values())])
        )
        rules.append(t.interleave("l.{n}.{p}", parts=halves, repeat=groups))
        now = {
            name: array.reshape(groups, halves, -1, columns).swapaxes(1, 2).reshape(-1, columns)
            for name, array in now.items()
        }
    if draw(st.booleans()):
        rules.append(t.transpose("l.{n}.{p}", "t.{n}.{p}"))
        now = {name.replace("l.", "t.", 1): array.T for name, array in now.items()}
    if draw(st.booleans()):
        dim = draw(st.integers(0, 2))
        letter = next(iter(now))[0]
        rules.append(t.stack(f"{letter}.{{n}}.{{p}}", "s.{p}", over="n", dim=dim))
        kinds = dict.fromkeys(name.split(".")[2] for name in now)
        now = {f"s.{p}": np.stack([now[f"{letter}.{n}.{p}"] for n in range(layers)], dim) for p in kinds}
        if draw(st.booleans()):
            other = draw(st.integers(0, 2))
            rules.append(t.unstack("s.{p}", "u.{m}.{p}", over="m", dim=other))
            now = {
                f"u.{m}.{name[2:]}": np.take(array, m, other)
                for name, array in now.items()
                for m in range(array.shape[other])
            }
    if draw(st.booleans()):
        more = draw(st.integers(0, 2))
        first = next(iter(now))
        longer = now[first].shape[0] + more
        rules.append(t.pad(first, longer))
        now[first] = np.concatenate([now[first], np.zeros((more, *now[first].shape[1:]), np.int32)])
    return rules, saved, now


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(chains(), st.data())
def test_any_box_of_what_any_chain_of_rules_makes_is_what_numpy_makes(
    chain: tuple[list[t.Rule], dict[str, Array], dict[str, Array]], data: st.DataObject
) -> None:
    rules, saved, made = chain
    assert offered(rules, saved) == {name: array.shape for name, array in made.items()}
    name = data.draw(st.sampled_from(sorted(made)))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in made[name].shape)
    lengths = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(made[name].shape, offsets, strict=True))
    box = Box(offsets, lengths)
    assert (read(rules, saved, name, box) == made[name][box.slices()]).all()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_inverted_rules_lead_back(chain: tuple[list[t.Rule], dict[str, Array], dict[str, Array]]) -> None:
    rules, saved, _ = chain
    rules = [rule for rule in rules if "Resize" not in type(rule).__name__]
    made = {name: read(rules, saved, name) for name in offered(rules, saved)}
    back = t.inverted(rules)
    assert offered(back, made) == {name: array.shape for name, array in saved.items()}
    for name, array in saved.items():
        assert (read(back, made, name) == array).all()


@table(
    ("rules", "why"),
    [
        ([t.rename("a", "b")], "has already"),
        ([t.rewrite("[ab]", "z")], "two different things"),
        ([t.split("a", ["x", "y", "z"])], "cannot be cut"),
        ([t.fuse(["a", "d"], "x")], "does not have"),
        ([t.fuse(["a", "b"], "x", parts=(3, 1))], "cannot be fused"),
        ([t.fuse(["a", "c.0"], "x")], "cannot be fused"),
        ([t.transpose("a", order=(0, 2, 1))], "cannot come in the order"),
        ([t.stack("c.{i}", "c", over="i")], "number 1"),
        ([t.stack("{i}", "c", over="i")], "not a number"),
        ([t.unstack("a", "a.{i}", over="i", dim=2)], "no dimension 2"),
        ([t.interleave("a", repeat=3)], "not 3 times 2 equal parts"),
        ([t.pad("a", 3)], "cannot be padded"),
        ([t.trim("a", 5)], "cannot be trimmed"),
        ([t.fuse(["a", "f"], "x")], "dtypes"),
    ],
)
def test_what_is_lossy_or_ambiguous_is_refused(rules: list[t.Rule], why: str) -> None:
    saved = {"a": numbered(4, 2), "b": numbered(4, 2), "c.0": numbered(2, 3), "c.2": numbered(2, 3)}
    saved["f"] = numbered(4, 2).astype(np.float32)
    with pytest.raises(MismatchError, match=why):
        Transformed.of(rules, catalog(saved))


@table(
    ("make", "why"),
    [
        (lambda: t.rename("a.{", "b"), "not a template"),
        (lambda: t.rename("{a}.{a}", "b"), "twice"),
        (lambda: t.split("a", ["x", "y", "z"], parts=(1, 2)), "2 parts were given for 3"),
        (lambda: t.split("a", "xyz"), "not a list"),
        (lambda: t.stack("a.{i}", "b", over="n"), "has to stand"),
        (lambda: t.inverted([t.pad("a", 5)]), "not known"),
        (lambda: t.inverted([t.rewrite("a", "b")]), "no inverse"),
        (lambda: t.inverted([t.names({"m/a": "m/b"})]), "no inverse"),  # type: ignore[list-item]
        (lambda: reknit.LoadOptions(transforms=["rename"]), "transforms is a list"),  # type: ignore[list-item]
        (lambda: t.rename("a.{i}", "b.{j}"), "field"),
        (lambda: t.interleave("q", repeat=0), "are none"),
        (lambda: t.interleave("q", parts=0), "are none"),
        (lambda: t.interleave("q", dim=-1), "are none"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_where_it_is_made(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


class Net(torch.nn.Module):
    """Three projections, or one of all three."""

    def __init__(self, seed: int, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = torch.nn.Linear(4, 4)
        if fused:
            self.qkv = torch.nn.Linear(4, 16)
        else:
            self.q, self.k, self.v = (torch.nn.Linear(4, n) for n in (8, 4, 4))

    def trained(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.25)
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return optimizer


FUSED = t.fuse(["q.{p}", "k.{p}", "v.{p}"], "qkv.{p}", parts=(2, 1, 1), repeat=2)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = [part.reshape(2, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(groups, 1).reshape(16, *q.shape[1:])


def test_a_parameters_states_and_options_go_with_it(tmp_path: Path) -> None:
    saved, target = Net(0, fused=False), Net(1, fused=True)
    before, after = saved.trained(), torch.optim.AdamW(target.parameters(), lr=1.0)
    reknit.save(tmp_path, {"m": saved, "o": before})
    options = reknit.LoadOptions(transforms=[FUSED])
    report = reknit.load(tmp_path, {"m": target, "o": after}, options=options)
    assert report.unexpected == ()
    assert "m/qkv.weight" in report.restored
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(saved, letter), kind) for letter in "qkv"]
        ours = getattr(target.qkv, kind)
        assert torch.equal(ours, fused(*parts))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after.state[ours][name], fused(*(before.state[p][name] for p in parts)))
        assert after.state[ours]["step"] == 1
    assert after.param_groups[0]["lr"] == 0.25
    back, again = Net(2, fused=False), None
    again = torch.optim.AdamW(back.parameters(), lr=1.0)
    reknit.save(tmp_path / "fused", {"m": target, "o": after})
    options = reknit.LoadOptions(transforms=t.inverted([FUSED]))
    reknit.load(tmp_path / "fused", {"m": back, "o": again}, options=options)
    for ours, theirs in zip(back.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(again.state[ours]["exp_avg"], before.state[theirs]["exp_avg"])
        assert again.state[ours]["step"] == 1


def test_steps_that_differ_cannot_become_one(tmp_path: Path) -> None:
    saved, target = Net(0, fused=False), Net(1, fused=True)
    before, after = saved.trained(), torch.optim.AdamW(target.parameters())
    before.state[saved.k.weight]["step"] += 1
    reknit.save(tmp_path, {"m": saved, "o": before})
    kept = target.qkv.weight.clone()
    why = r"o/state/k.weight/step: it differs from o/state/q.weight/step in the checkpoint \(2.0 and 1.0\)"
    with pytest.raises(MismatchError, match=why):
        reknit.load(tmp_path, {"m": target, "o": after}, options=reknit.LoadOptions(transforms=[FUSED]))
    assert torch.equal(target.qkv.weight, kept)
    assert not after.state
    report = reknit.load(
        tmp_path, {"m": target, "o": after}, strict=False, options=reknit.LoadOptions(transforms=[FUSED])
    )
    assert list(report.mismatched) == ["o/state/k.weight/step"]
    assert report.unexpected == ()
    assert after.state[target.qkv.weight]["step"] == 1


def test_options_that_differ_cannot_become_one(tmp_path: Path) -> None:
    saved, target = Net(0, fused=False), Net(1, fused=True)
    groups = [{"params": [saved.q.weight], "lr": 1.0}, {"params": [saved.k.weight], "lr": 2.0}]
    named = torch.optim.SGD([*groups, {"params": [saved.v.weight], "lr": 1.0}])
    reknit.save(tmp_path, {"m": saved, "o": named})
    optimizer = torch.optim.SGD([target.qkv.weight], lr=1.0)
    weights = t.fuse(["q.weight", "k.weight", "v.weight"], "qkv.weight", parts=(2, 1, 1), repeat=2)
    biases = t.fuse(["q.bias", "k.bias", "v.bias"], "qkv.bias", parts=(2, 1, 1), repeat=2)
    kept = target.qkv.weight.clone()
    with pytest.raises(MismatchError, match="differ"):
        reknit.load(
            tmp_path, {"m": target, "o": optimizer}, options=reknit.LoadOptions(transforms=[weights, biases])
        )
    assert torch.equal(target.qkv.weight, kept)


def test_ranks_read_only_the_rows_that_they_need(tmp_path: Path) -> None:
    whole = numbered(1 << 14, 64)
    reknit.save(tmp_path, {"model": {"qkv": whole}})
    rules = [t.split("qkv", ["q", "k", "v"], parts=(2, 1, 1), repeat=1), t.drop("q"), t.drop("v")]
    options = reknit.LoadOptions(transforms=rules, verify="off")
    target = np.zeros((1 << 12, 64), np.int32)
    with pytest.raises(MismatchError, match="missing: model/qkv"):
        reknit.load(tmp_path, {"model": {"qkv": np.zeros_like(whole)}}, options=options)
    report = reknit.load(tmp_path, {"model": {"k": target}}, options=options)
    assert (target == whole[1 << 13 : 3 << 12]).all()
    assert report.restored == ("model/k",)
    assert report.nbytes_read < whole.nbytes / 2


def test_the_same_on_several_ranks(tmp_path: Path) -> None:
    saved = {f"e.{n}": numbered(3, 5, first=15 * n) for n in range(4)}
    reknit.save(tmp_path, {"model": saved})
    options = reknit.LoadOptions(
        transforms=[t.stack("e.{n}", "e", over="n"), t.transpose("e", order=(2, 0, 1))]
    )

    def rank(group: Any) -> Array:
        target = np.zeros((5, 4, 3), np.int32)
        reknit.load(tmp_path, {"model": {"e": target}}, options=options, group=group)
        return target

    expected = np.stack([saved[f"e.{n}"] for n in range(4)]).transpose(2, 0, 1)
    assert all((target == expected).all() for target in run_ranks(2, rank))


def test_what_is_left_over_is_unexpected_unless_it_is_dropped(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"model": {"a": numbered(2), "b": numbered(2)}})
    target = {"model": {"x": np.zeros(2, np.int32)}}
    with pytest.raises(MismatchError, match="unexpected: model/b"):
        reknit.load(tmp_path, target, options=reknit.LoadOptions(transforms=[t.rename("a", "x")]))
    reknit.load(tmp_path, target, options=reknit.LoadOptions(transforms=[t.rename("a", "x"), t.drop("b")]))
    assert (target["model"]["x"] == numbered(2)).all()


def test_a_tensor_can_have_a_second_name(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"model": {"emb": numbered(2)}})
    target = {"emb": np.zeros(2, np.int32), "head": np.zeros(2, np.int32)}
    reknit.load(tmp_path, {"model": target}, options=reknit.LoadOptions(transforms=[t.copy("emb", "head")]))
    assert (target["head"] == target["emb"]).all()
    assert target["head"][1] == 1


def test_what_rules_make_in_another_length_is_taken_as_far_as_it_goes_and_told(tmp_path: Path) -> None:
    saved = {"w": numbered(4, 3), "same": numbered(2, first=50), "b": numbered(5)}
    reknit.save(tmp_path / "a", {"model": saved})
    rules = [t.transpose("w", "weight"), t.rename("same", "other")]
    target = {"weight": np.full((3, 6), -1, np.int32), "other": numbered(2), "b": np.full(3, -1, np.int32)}
    options = reknit.LoadOptions(transforms=rules, allow_shape_mismatch=("model/*",))
    report = reknit.load(tmp_path / "a", {"model": target}, options=options)
    assert (target["weight"][:, :4] == saved["w"].T).all()
    assert (target["weight"][:, 4:] == -1).all()
    assert (target["b"] == saved["b"][:3]).all()
    assert report.restored == ("model/other",)
    assert set(report.mismatched) == {"model/weight", "model/b"}
    reported = report.mismatched["model/weight"]
    assert "make shape [3, 4]" in reported
    assert "wanted [3, 6]: took [0:3,0:4]" in reported


def test_of_a_tensor_in_another_length_and_of_another_dtype_nothing_is_told_as_taken(tmp_path: Path) -> None:
    reknit.save(tmp_path / "a", {"model": {"w": numbered(4), "b": numbered(1)}})
    target = {"weight": np.full(6, -1, np.float32), "b": numbered(1)}
    options = reknit.LoadOptions(transforms=[t.rename("w", "weight")], allow_shape_mismatch=("model/*",))
    report = reknit.load(tmp_path / "a", {"model": target}, strict=["!model/*"], options=options)
    assert "saved dtype int32, wanted float32" in report.mismatched["model/weight"]
    assert "took" not in report.mismatched["model/weight"]
    assert (target["weight"] == -1).all()


def test_a_field_of_one_part_is_filled_with_what_another_template_found_in_several(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"m": {"p.a.c": torch.arange(2.0), "a.c.b": torch.arange(2.0, 4.0)}})
    state = {"m": {"t.a.c": torch.zeros(4)}}
    rules = [t.fuse(["p.{x}", "{x*}.b"], "t.{x}")]
    reknit.load(tmp_path, state, options=reknit.LoadOptions(transforms=rules))
    assert state["m"]["t.a.c"].tolist() == [0, 1, 2, 3]
