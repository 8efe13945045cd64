"""Comparison of two tensors of torch, as far as this rank holds them."""

from __future__ import annotations

from typing import Any

import torch

from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import torch_private
from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.torch.subclasses import is_composite


def is_array(value: Any) -> bool:
    """Return whether this is a tensor of torch."""
    return isinstance(value, torch.Tensor)


def same(a: Any, b: Any) -> bool:
    """Return whether two tensors have one class, dtype, shape and layout, and the same bytes on this rank.

    Sends no message.  Sparse, nested, quantized and composite tensors are compared by their parts.  A tensor
    without bytes (on the meta device) is the same only as itself, which the caller has compared.
    """
    if _class(a) is not _class(b) or a.dtype != b.dtype:
        return False
    held = torch_private.local_shards(a)
    if held is None and (a.is_nested or b.is_nested):  # without a shape
        return a.layout == b.layout and a.is_nested == b.is_nested and same_value(a.unbind(), b.unbind())
    if tuple(a.shape) != tuple(b.shape):
        return False
    if held is not None:
        return _same_shards(held, torch_private.local_shards(b) or [])
    if is_dtensor(a):
        alike = a.device_mesh == b.device_mesh and tuple(a.placements) == tuple(b.placements)
        return alike and same(torch_private.local_of(a), torch_private.local_of(b))
    if a.layout != b.layout or a.is_meta or b.is_meta:
        return False
    with torch.no_grad():
        if (parts := _parts(a)) is not None:
            return same_value(parts, _parts(b))
        if torch_private.hides_data(_class(a)):
            return False
        one, other = bytes_of(a), bytes_of(b)
        return torch.equal(one, other if one.device == other.device else other.to(one.device))


def _parts(tensor: Any) -> Any:
    """Return the parts of a tensor without bytes of its own, tensors and values; None for any other."""
    if is_composite(tensor):
        names, context = tensor.__tensor_flatten__()
        return [context, {name: getattr(tensor, name) for name in names}]
    if tensor.layout == torch.sparse_coo:
        listed = tensor.coalesce()
        return [tensor.is_coalesced(), listed.indices(), listed.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_quantized:
        return [tensor.qscheme(), tensor.int_repr(), _scales(tensor)]
    return tensor.to_dense() if tensor.is_mkldnn else None


def _scales(tensor: Any) -> Any:
    """Return the numbers that turn the integers of a quantized tensor into its values."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.q_scale(), tensor.q_zero_point()
    axis = tensor.q_per_channel_axis()
    return axis, tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()


def _same_shards(held: list[tuple[tuple[int, ...], Any]], others: list[tuple[tuple[int, ...], Any]]) -> bool:
    return len(held) == len(others) and all(
        at == there and same(shard, other) for (at, shard), (there, other) in zip(held, others, strict=True)
    )


def _class(tensor: Any) -> type:
    """Return the class of a tensor; a parameter has that of other tensors."""
    return torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a row of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if "float4" in str(plain.dtype):
        plain = plain.view(torch.uint8)  # torch 2.8 has this dtype, but copies only its bytes
    # For torch, one element is contiguous at any stride, and then it cannot view its bytes.
    dense = plain.contiguous() if plain.numel() > 1 else plain.clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8)
