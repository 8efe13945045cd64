"""Checks in one process of parts that a tree may lack, and of numbers that may be arrays."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import reknit
from reknit.errors import MismatchError
from tests.jax.trees import Own, raises


class Count(NamedTuple):
    n: Any
    trace: Any = None


class OldCount(NamedTuple):
    n: Any


@flax.struct.dataclass
class Model:
    w: Any


@flax.struct.dataclass
class NewModel:
    w: Any
    ema: Any = None


def check_a_step_is_a_number_before_training_and_an_array_after_it(folder: str) -> None:
    def fresh(times: float) -> Any:
        return TrainState.create(apply_fn=None, params={"w": jnp.ones(2) * times}, tx=optax.sgd(0.1))

    train = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    trained = train(train(fresh(1.0)))
    reknit.save(folder, {"train": trained})
    target = {"train": fresh(2.0)}
    reknit.load(folder, target)
    assert type(target["train"].step) is int
    assert target["train"].step == 2
    assert target["train"].params["w"].tolist() == trained.params["w"].tolist()

    reknit.save(f"{folder}/fresh", {"train": fresh(3.0).replace(step=7)})
    for after in (trained, jax.eval_shape(lambda: trained)):
        again = {"train": after}
        reknit.load(f"{folder}/fresh", again)
        step = again["train"].step
        assert (step.tolist(), step.dtype, step.weak_type) == (7, "int32", trained.step.weak_type)
        assert again["train"].params["w"].tolist() == [3, 3]


def check_numbers_and_arrays_fit_each_other_in_the_kind_of_the_target(folder: str) -> None:
    saved = {"count": Count(5), "a": jnp.asarray(0.1), "b": jnp.asarray(True), "c": 2**40, "d": np.int8(3)}
    reknit.save(folder, {"s": saved})
    target: dict[str, Any] = {"count": Count(jnp.zeros((), "bfloat16")), "a": 0.0, "d": jnp.zeros((), int)}
    reknit.load(folder, {"s": target}, options=reknit.LoadOptions(only=("s/count/*", "s/a", "s/d")))
    assert type(target["count"]) is Count
    assert (target["count"].n.tolist(), target["count"].n.dtype) == (5, "bfloat16")
    assert target["a"] == float(np.float32(0.1))
    assert target["d"].tolist() == 3
    for name, here, why in (("b", 0, "another kind of number"), ("c", jnp.zeros((), int), "cannot hold it")):
        state = {"s": saved | {name: here}}
        raises(MismatchError, why, lambda state=state: reknit.load(folder, state))
        assert state["s"][name] is here


def check_a_module_without_a_bias_and_its_state_fit_each_other(folder: str) -> None:
    class Net(nnx.Module):
        def __init__(self, seed: int, bias: bool = False) -> None:
            self.layers = nnx.List([nnx.Linear(2, 2, use_bias=bias, rngs=nnx.Rngs(seed))])

    saved = Net(0)
    kernel = saved.layers[0].kernel[...]
    reknit.save(f"{folder}/module", {"net": saved})
    reknit.save(f"{folder}/state", {"net": nnx.state(saved)})
    for source in ("module", "state"):
        module, state = Net(1), nnx.state(Net(2))
        pure: dict[str, Any] = {"net": nnx.to_pure_dict(nnx.state(Net(3)))}
        reknit.load(f"{folder}/{source}", {"net": module})
        reknit.load(f"{folder}/{source}", {"net": state})
        reknit.load(f"{folder}/{source}", pure)
        assert module.layers[0].bias is None
        for found in (module.layers[0].kernel, state["layers"][0]["kernel"]):
            assert np.array_equal(np.asarray(found[...]), kernel)
        assert np.array_equal(pure["net"]["layers"][0]["kernel"], kernel)
        missing = "missing: net/layers/0/bias: " + ("it is None" if source == "module" else "the checkpoint")
        other = {"net": Net(4, bias=True)}
        raises(MismatchError, missing, lambda s=source, t=other: reknit.load(f"{folder}/{s}", t))
    reknit.save(f"{folder}/biased", {"net": Net(5, bias=True)})
    unexpected = "in 1 place; nothing was changed:\n  unexpected: net/layers/0/bias: "
    raises(MismatchError, unexpected, lambda: reknit.load(f"{folder}/biased", {"net": Net(6)}))


def check_a_function_stays_where_none_was_saved_for_it(folder: str) -> None:
    saved = {"m": Own(jnp.ones(2), None), "n": {"f": None, "x": jnp.ones(1)}}
    reknit.save(folder, saved)
    target: dict[str, Any] = {"m": Own(jnp.zeros(2), jax.nn.relu), "n": {"f": len, "x": jnp.zeros(1)}}
    report = reknit.load(folder, target)
    assert target["m"].b is jax.nn.relu
    assert target["n"]["f"] is len
    assert target["m"].a.tolist() == [1, 1]
    assert len(report.notes) == 2
    reknit.save(folder, {"m": Own(jnp.ones(2), 3)}, overwrite=True)
    wrong = {"m": Own(jnp.zeros(2), jax.nn.relu)}
    raises(
        MismatchError,
        "m/b: it is of type int in the checkpoint and a function here",
        lambda: reknit.load(folder, wrong),
    )
    assert wrong["m"].a.tolist() == [0, 0]


def check_a_class_with_a_new_optional_field_reads_its_older_checkpoint(folder: str) -> None:
    w, zeros = jnp.ones(2), jnp.zeros(2)
    reknit.save(folder, {"s": {"model": Model(w), "count": OldCount(5)}})
    newer: dict[str, Any] = {"model": NewModel(zeros), "count": Count(0)}
    reknit.load(folder, {"s": newer})
    assert newer["model"].w.tolist() == [1, 1]
    assert newer["model"].ema is None
    assert newer["count"] == Count(5)
    needs = {"model": NewModel(zeros, {"w": zeros}), "count": Count(0)}
    raises(
        MismatchError,
        "in 1 place; nothing was changed:\n  missing: s/model/ema/w: ",
        lambda: reknit.load(folder, {"s": needs}),
    )
    back = f"{folder}/back"
    reknit.save(back, {"s": newer})
    older: dict[str, Any] = {"model": Model(zeros), "count": OldCount(0)}
    reknit.load(back, {"s": older})
    assert older["model"].w.tolist() == [1, 1]
    raises(
        MismatchError,
        "missing: s/model/ema/w: s/model/ema is None in the checkpoint",
        lambda: reknit.load(back, {"s": needs}),
    )


def check_a_saved_none_goes_where_none_is_and_a_saved_value_in_its_place(folder: str) -> None:
    reknit.save(folder, {"s": freeze({"w": jnp.ones(2), "b": None, "n": 5})})
    target: dict[str, Any] = {"s": {"w": jnp.zeros(2), "b": "here", "n": None}}
    reknit.load(folder, target)
    assert (target["s"]["b"], target["s"]["n"]) == (None, 5)
    lacking = {"s": {"w": jnp.zeros(2), "n": 0, "place": None}}
    raises(
        MismatchError,
        "in 1 place; nothing was changed:\n  missing: s/place: ",
        lambda: reknit.load(folder, lacking),
    )
