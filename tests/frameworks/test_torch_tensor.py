from __future__ import annotations

from typing import Any

import pytest
import torch

from reknit.frameworks.torch.tensor import local_memory, plain_dtype
from reknit.frameworks.walk.walk import Place


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
