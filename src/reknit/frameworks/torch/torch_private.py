"""The private parts of torch that reknit uses, all in this module."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reknit.types import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def split_factor(placement: Any) -> int | None:
    """Return the split factor of a strided DTensor placement, or None for any other placement."""
    module = sys.modules.get("torch.distributed.tensor.placement_types")
    if module is not None and isinstance(placement, module._StridedShard):
        return int(placement.split_factor)
    return None


def cuts_strides_at_once() -> bool:
    """Return whether torch cuts into the parts of all ranks at once for a strided placement.

    Before torch 2.10 it did; later versions cut into `split_factor` pieces, and then each of these.
    """
    import torch

    version: Any = torch.__version__
    return bool(version < (2, 10))


def chunk_list(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Return (offsets, sizes) as a DTensor's local tensor declares them, or None if it does not."""
    hook = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    if hook is None:
        return None
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in hook()]


def any_chunk_list(locals_: Iterable[Any]) -> bool:
    """Return whether one of the local tensors of some DTensors declares its own place."""
    return any([getattr(local, "__create_chunk_list__", None) is not None for local in locals_])


def has_groups(mesh: Any) -> bool:
    """Return whether a mesh has process groups; torch before 2.7 and veScale have them under another name."""
    return hasattr(mesh, "_dim_group_names") or hasattr(mesh, "_dim_group_infos")


def keeps_order(mesh: Any) -> bool:
    """Return whether the process groups of a mesh have the order of the mesh, by `preserve_rank_order`."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


def quick_access() -> Any:
    """Return a `with` block in which a DTensor returns shape and dtype as quickly as a plain tensor."""
    import torch

    return torch._C.DisableTorchFunctionSubclass()


def locals_of(tensors: Iterable[Any]) -> list[Any]:
    """Return `local_of` of many DTensors."""
    return [tensor._local_tensor for tensor in tensors]


def layouts_of(tensors: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return placements, meshes and orders of the cuts of many DTensors, without their slow properties."""
    specs = [tensor._spec for tensor in tensors]
    try:
        orders = [spec.shard_order for spec in specs]
    except AttributeError:  # in older releases
        orders = [getattr(spec, "shard_order", None) for spec in specs]
    return [spec.placements for spec in specs], [spec.mesh for spec in specs], orders


def check_alike(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return the check that torch's compiler has for its inputs, or None if this release has none.

    It is called with as many tensors, and returns whether all are different objects, each with type, dtype,
    device, sizes, strides and flags as the tensor had at its place.  It keeps none of the tensors.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
    except (ImportError, TypeError, RuntimeError):
        return None
    return check


def placed(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the memory of a DTensor on this rank, and all facts that decide which part it is."""
    spec = tensor._spec
    kinds = tuple(map(type, spec.placements))  # placements of different types can be equal
    order = getattr(spec, "shard_order", None)
    return tensor._local_tensor, (id(spec.mesh), kinds, spec.placements, order, tensor.shape)


def is_reordered(tensor: Any) -> bool:
    """Return whether mesh dimensions cut one dimension of a DTensor in another order than their own."""
    spec = getattr(tensor, "_spec", None)
    cuts = getattr(spec, "shard_order", None) or ()
    if all(tuple(cut.mesh_dims) == tuple(sorted(cut.mesh_dims)) for cut in cuts):
        return False
    # Torch 2.10 derives an order from strided placements, as of `fully_shard` after tensor parallelism.
    return all(split_factor(placement) is None for placement in spec.placements)  # type: ignore[union-attr]


def local_of(tensor: Any) -> Any:
    """Return the memory of a DTensor on this rank; unlike `to_local`, without a view in autograd's graph."""
    return tensor._local_tensor


def plain_spec(tensor: Any, local: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return mesh and placements of one of torch's own DTensors; None if they may not give its place."""
    import torch

    module: Any = sys.modules.get("torch.distributed.tensor")
    if (
        type(local) is not torch.Tensor
        or local.__dict__
        or module is None
        or type(tensor) is not module.DTensor
        or is_reordered(tensor)
    ):
        return None
    spec = tensor._spec
    return spec.mesh, spec.placements


def hides_data(kind: type) -> bool:
    """Return whether a type of tensor handles operations itself, so that its memory is not its values."""
    import torch

    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def group_name(group: Any) -> str:
    """Return the name of a process group, the same for all its members."""
    return str(group.group_name)


class FlatMember(Struct, frozen=True):
    """A parameter inside the flat parameter of an FSDP1 unit.

    `names` are those below the unit's wrapped module, more than one if it is tied; `owner` is the module that
    has it under the last element of the first.  `shape` and `stride` are of the tensor that was flattened,
    which is the local one of `spec` if the parameter was a DTensor.  `part` is the first element that this
    rank has, the number of elements from there on, and their offset in its shard; None without an element.
    """

    names: tuple[str, ...]
    owner: Any
    parameter: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    spec: Any
    part: tuple[int, int, int] | None


class FlatUnit(Struct, frozen=True):
    """The flat parameter of an FSDP1 unit, of which each rank has a shard.

    `live` is the memory of this rank's shard, padding included.  `shard` is the tensor to which FSDP returns
    when it drops the gathered copy (None before the first forward).  `phase` is FSDP's present action.
    `originals` is set if optimizers see the original parameters and not the flat one.
    """

    handle: Any
    flat: Any
    live: Any
    shard: Any
    sharded: bool
    originals: bool
    phase: str
    group: Any
    replicas: Any
    members: tuple[FlatMember, ...]


def flat_unit(module: Any) -> FlatUnit | None:
    """Return the flat parameter of an FSDP1 module, or None for a module without one of its own."""
    handle = getattr(module, "_handle", None)
    if handle is None:
        return None
    flat = handle.flat_param
    phase = handle._training_state.name
    shard = getattr(flat, "_local_shard", None)
    # Between forwards the flat parameter is the shard; at other times it may be the gathered copy.
    live = flat.data if phase == "IDLE" or shard is None else shard
    return FlatUnit(
        handle,
        flat,
        live,
        shard,
        handle.uses_sharded_strategy,
        originals=flat._params is not None,
        phase=phase,
        group=handle.process_group,
        replicas=vars(module).get("_inter_node_pg"),  # getattr would search the wrapped module: slow
        members=tuple(_flat_members(flat)),
    )


def _flat_members(flat: Any) -> Iterator[FlatMember]:
    tied: dict[tuple[int, str], list[str]] = {}
    for name, _, path, first_name, first_owner, _ in flat._shared_param_infos:
        tied.setdefault((id(first_owner), first_name), []).append(f"{path}.{name}" if path else name)
    names, parameters = (flat._fqns, flat._param_infos), flat._params or [None] * len(flat._fqns)
    layouts = (flat._shapes, flat._strides, flat._contiguities, flat._param_extensions)
    columns = zip(*names, parameters, *layouts, flat._shard_param_infos, strict=True)
    for fqn, (name, owner, _), parameter, shape, stride, contiguous, spec, here in columns:
        part = (here.intra_param_start_idx, here.numel_in_shard, here.offset_in_shard)
        yield FlatMember(
            (fqn, *tied.get((id(owner), name), ())),
            owner,
            parameter,
            tuple(shape),
            None if contiguous else tuple(stride),
            spec=spec,
            part=part if here.numel_in_shard else None,
        )


def is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 made a parameter a part of a flat one, or this is that flat one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def has_gathered_copy(unit: FlatUnit) -> bool:
    """Return whether an FSDP1 unit keeps gathered parameters, which the next forward would use."""
    return any(copy.untyped_storage().size() for copy in _gathered_copies(unit))


def drop_gathered_copy(unit: FlatUnit) -> None:
    """Make an FSDP1 unit go back to its shard, and gather again before the next forward.  Sends nothing."""
    unit.handle.reshard(False)
    unit.handle.post_reshard()
    unit.handle._prefetched = False
    for copy in _gathered_copies(unit):
        if devices.is_queued(copy):
            copy.record_stream(devices.current_stream(copy.device))
        copy.untyped_storage().resize_(0)


def _gathered_copies(unit: FlatUnit) -> list[Any]:
    if not unit.sharded:
        return []
    names = ("_full_param_padded", "_full_prec_full_param_padded")
    return [copy for name in names if (copy := getattr(unit.flat, name, None)) is not None]


def offloaded(module: Any) -> list[Any]:
    """Return the parameters of a module and its inner modules with shards that FSDP2 keeps in host memory."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    states = [one._get_fsdp_state() for one in module.modules() if kind is not None and isinstance(one, kind)]
    groups = [
        group
        for state in states  # before torch 2.13 a state had one group
        for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)])
    ]
    parameters = [one for group in groups if group is not None for one in group.fsdp_params]
    return [one.sharded_param for one in parameters if one.offload_to_cpu]


def zero_owners(optimizer: Any) -> dict[Any, int]:
    """Return the rank in its group that has the states of each parameter of a ZeroRedundancyOptimizer."""
    owners: dict[Any, int] = optimizer._param_to_rank
    return owners


def steps_in_backward(optimizer: Any) -> bool:
    """Return whether a ZeroRedundancyOptimizer leaves its steps to DistributedDataParallel."""
    return bool(optimizer._overlap_with_ddp)


def own_entries(module: Any) -> dict[str, Any]:
    """Return the state-dict entries of one module without its children, and without running hooks."""
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, "", True)
    return entries


def load_own_entries(module: Any, entries: dict[str, Any]) -> list[str]:
    """Let one module without its children take its state-dict entries, and return the errors."""
    errors: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    metadata, found = {"version": module._version}, (missing, unexpected, errors)
    module._load_from_state_dict(entries, "", metadata, False, *found)
    return errors


def has_state_dict_hooks(module: Any) -> bool:
    """Return whether a module has hooks that change its state dict."""
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks)


_SHARDS_AGAIN = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"


def run_sharding_hooks(module: Any) -> bool:
    """Run the hooks by which FSDP2 puts parameters back into their shards before a state dict is made.

    False, and nothing is run, for a module with other hooks of that kind.
    """
    hooks = module._state_dict_pre_hooks.values()
    known = all(
        getattr(hook, "__qualname__", "") == _SHARDS_AGAIN
        and hook.__module__.startswith("torch.distributed.")
        for hook in hooks
    )
    if known:
        for hook in hooks:
            hook(module, "", True)
    return known


_STATE_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer of torch has hooks; a wrapper without torch's `__init__` has none."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def state_hooks(optimizer: Any) -> list[Any]:
    """Return the hooks that run when an optimizer's state dict is made or loaded."""
    found = (getattr(optimizer, f"_optimizer_{kind}_hooks", None) or {} for kind in _STATE_HOOKS)
    return [hook for hooks in found for hook in hooks.values()]


def load_hooks(module: Any) -> list[tuple[Any, bool]]:
    """Return the hooks that a load of a module's state dict runs, and whether each runs before it."""
    before = [(getattr(hook, "hook", hook), True) for hook in module._load_state_dict_pre_hooks.values()]
    return before + [(hook, False) for hook in module._load_state_dict_post_hooks.values()]


def loading_method(kind: type) -> Any:
    """Return the method by which a type of module takes its own entries of a state dict."""
    return kind._load_from_state_dict  # type: ignore[attr-defined]


def local_shards(tensor: Any) -> list[tuple[tuple[int, ...], Any]] | None:
    """Return offsets and memory of this rank's shards of a tensor that consists of such shards.

    That is a ShardedTensor, or a DTensor whose local tensor is a LocalShardsWrapper; None for any other.
    """
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if module is not None and isinstance(tensor, module.ShardedTensor):
        return [(tuple(one.metadata.shard_offsets), one.tensor) for one in tensor.local_shards()]
    module = sys.modules.get("torch.distributed.tensor._shards_wrapper")
    if module is None:
        return None
    local = getattr(tensor, "_local_tensor", None)
    if not isinstance(local, module.LocalShardsWrapper):
        return None
    # A wrapper without a shard has the offsets of an empty one nevertheless.
    return [(tuple(at), one) for at, one in zip(local.local_offsets(), local.local_shards(), strict=False)]
