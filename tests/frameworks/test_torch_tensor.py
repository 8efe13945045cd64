from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import StateError
from reknit.frameworks.torch.tensor import local_memory, plain_dtype
from reknit.frameworks.walk.walk import Place
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable


class Odd(torch.Tensor):
    pass


def not_plain() -> dict[str, Any]:
    tensor = torch.arange(4.0)
    complex_ = torch.complex(tensor, tensor)
    return {
        "parameter": torch.nn.Parameter(tensor),
        "subclass": tensor.as_subclass(Odd),
        "sparse": tensor.to_sparse(),
        "meta": tensor.to("meta"),
        "complex": complex_,
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "quantized": torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([tensor, tensor]),
        "needs a gradient": tensor.clone().requires_grad_(),
        "number": 3.0,
        "none": None,
    }


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantiz")
def test_only_what_has_its_values_in_its_own_memory_is_plain() -> None:
    assert plain_dtype(torch.zeros(3, dtype=torch.bfloat16)) == "bfloat16"
    assert plain_dtype(torch.zeros(4, 4)[::2, 1]) == "float32"
    for kind, value in not_plain().items():
        assert plain_dtype(value) is None, kind


def test_memory_to_save_is_detached_and_holds_what_the_tensor_says() -> None:
    for kind in ("parameter", "needs a gradient", "complex", "conjugated", "negated"):
        tensor = not_plain()[kind]
        memory, settle = local_memory(tensor, Place("m"), fill=False)
        assert settle is None
        assert not memory.requires_grad
        assert not memory.is_conj()
        assert not memory.is_neg()
        assert torch.equal(memory, tensor)


def without_memory(folder: str) -> list[str]:
    """Save and load tensors of a device that shows no memory, as XLA; return the errors."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
    here: Any = {"m": {"x": torch.ones(2, 3, device="lazy"), "y": torch.ones(2, 3, device="lazy")}}
    model = torch.nn.Linear(2, 2).to("lazy")
    path = Path(folder)
    reknit.save(
        path / "x", {"m": {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}, "n": torch.nn.Linear(2, 2)}
    )
    calls: list[Callable[[], object]] = [
        lambda: reknit.save(path / "y", here),
        lambda: reknit.save(path / "y", here, wait=False).result(),
        lambda: reknit.save(path / "y", {"m": model}),
        lambda: reknit.load(path / "x", here),
        lambda: reknit.load(path / "x", {"n": model}),
    ]
    errors = []
    for call in calls:
        with pytest.raises(StateError) as caught:
            call()
        errors.append(str(caught.value).partition(" [")[0])
    assert not list(path.glob("y/**/manifest*"))
    assert here["m"]["x"].cpu().eq(1).all()
    return errors


def test_a_device_that_shows_no_memory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (errors,) = run(1, without_memory, str(tmp_path), joined=False)
    assert errors == [
        f"{name} is on lazy:0, where torch shows no memory of it"
        for name in ("m/x", "m/x", "m/weight", "m/x", "n/weight")
    ]
