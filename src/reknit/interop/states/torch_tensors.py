"""Which tensors and values can an export for torch hold?"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reknit.errors import MismatchError
from reknit.interop.states.state_tree import SavedState, Stub, dotted, kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import TensorSpec

_SAFE = frozenset({type(None), bool, int, float, str, Stub})
"""Types of most leaves, which need no trial."""


_HOW = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of optimizers that decide only how torch computes; a checkpoint does not have them."""


def for_torch(saved: SavedState) -> SavedState:
    """Return a state without the values that ``torch.load(weights_only=True)`` refuses.

    The groups of optimizers have all options that DCP asks for.
    """
    safe = kept(saved.without_generators(), _why_not)
    return SavedState(_with_options(safe.state), safe.left_out)


def _with_options(state: Any) -> Any:
    """Return a state in which groups of optimizers have torch's defaults of options that are not saved."""
    if type(state) is not dict:
        return state
    groups = state.get("param_groups")
    state = {key: _with_options(value) for key, value in state.items()}
    if type(groups) is list and all(type(group) is dict and "params" in group for group in groups):
        state["param_groups"] = [_HOW | group for group in groups]
    return state


def _why_not(value: Any) -> str | None:
    """Return why `torch.load` refuses a value, or None."""
    if type(value) in _SAFE:
        return None
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # pickle, torch and the class of the value have errors of their own
        return f"torch.load(weights_only=True) does not read a {type(value).__name__}"
    return None


def torch_dtype(name: str, spec: TensorSpec) -> torch.dtype:
    """Return the dtype of a spec.  Raises `MismatchError`, with the name, if this torch lacks it."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(
            f"torch {torch.__version__} has no dtype for the tensor {name!r}, a {spec}",
            remedy="update torch, or leave out its item",
        )
    return dtype


def empty_tensor(name: str, spec: TensorSpec, device: str = "cpu") -> torch.Tensor:
    """Return a tensor without values.  Raises `MismatchError` if this torch lacks its dtype."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        return torch.empty(spec.shape, dtype=torch_dtype(name, spec), device=device)


def tensor_of(data: NDArray[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return an array of these elements as a tensor with the same memory."""
    return torch.from_numpy(data.reshape(-1).view(np.uint8)).view(dtype).reshape(tuple(shape))


def stub_tensors(saved: SavedState) -> list[Stub]:
    """Return the tensors of a state.  Raises `MismatchError` for one that torch cannot hold."""
    stubs = saved.tensors()
    for path, stub in stubs.items():
        torch_dtype(dotted(path), stub.spec)
    return list(stubs.values())
