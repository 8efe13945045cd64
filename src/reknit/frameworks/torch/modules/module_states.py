"""The state dicts of a module tree, assembled without gathering the parameters of FSDP1."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.torch import torch_private
from reknit.frameworks.torch.modules import fsdp
from reknit.frameworks.torch.modules.module_names import WRAPPERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.frameworks.torch.modules.flat_parameter import FlatParameter
    from reknit.frameworks.torch.modules.module_names import ModuleNames
    from reknit.frameworks.walk.walk import Place

EXTRA = "_extra_state"
"""Name of the entry that torch's modules have for values other than tensors."""


class ModuleState(Struct, frozen=True):
    """A module, its prefix in the tree (empty, or ending in a dot), and the entries of its own state dict.

    `metadata` are the versions in it.  `whole` is set if it contains the entries of all modules below, too.
    """

    module: nn.Module
    prefix: str
    raw: dict[str, Any]
    metadata: dict[str, Any] | None = None
    whole: bool = True


def module_state(module: nn.Module, prefix: str) -> ModuleState:
    """Return a module's state dict, with the live parameters in it if its own method can show them."""
    try:
        inspect.signature(module.state_dict).bind(keep_vars=True)
    except TypeError:
        state = module.state_dict()
    else:
        state = module.state_dict(keep_vars=True)
    return ModuleState(module, prefix, dict(state), getattr(state, "_metadata", None))


class SplitStates:
    """The state dicts of a tree with FSDP1 units, read without FSDP's hooks, which would gather."""

    def __init__(
        self, module: nn.Module, names: ModuleNames, flats: Sequence[FlatParameter], place: Place
    ) -> None:
        self._root, self._names, self._place = module, names, place
        self._taken = {name for flat in flats for name in flat.names}
        self._owners = {id(names.modules[name.rpartition(".")[0]]) for name in self._taken}
        inside = [tensor for flat in flats for tensor in (flat.flat, flat.original)]
        self._flats = {id(tensor) for tensor in inside if tensor is not None}
        self._free: dict[int, bool] = {}

    def states(self) -> Iterator[ModuleState]:
        """Yield the state dicts of all parts of the tree without FSDP1, and of single modules."""
        return self._below(self._root, "")

    def _below(self, module: nn.Module, prefix: str) -> Iterator[ModuleState]:
        if self._is_free(module):
            yield module_state(module, prefix)
            return
        self._require_plain(module, prefix)
        own = torch_private.own_entries(module)
        kept = {key: value for key, value in own.items() if not self._is_taken(prefix + key, value)}
        self._require_live(module, prefix, kept)
        yield ModuleState(module, prefix, kept, whole=False)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._below(child, f"{prefix}{name}.")

    def _is_free(self, module: nn.Module) -> bool:
        """Return whether a module and all modules below it are without FSDP1."""
        key = id(module)
        if key not in self._free:
            self._free[key] = (
                not fsdp.is_wrapper(module)
                and key not in self._owners
                and not any(id(parameter) in self._flats for parameter in module._parameters.values())
                and all(self._is_free(child) for child in module.children())
            )
        return self._free[key]

    def _is_taken(self, key: str, value: Any) -> bool:
        if id(value) in self._flats and (name := self._names.name(key)) not in self._taken:
            if name.rpartition(".")[2] == "_flat_param":
                return True
            raise StateError(
                f"{self._place.child(name)} is tied to a parameter in another FSDP unit",
                remedy="wrap the modules that share it in one unit, as FSDP demands",
            )
        return self._names.name(key) in self._taken

    def _require_live(self, module: nn.Module, prefix: str, entries: dict[str, Any]) -> None:
        """Raise `StateError` for entries that a module computed: FSDP may have taken its tensors."""
        own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
        for key, value in entries.items():
            if key != EXTRA and id(value) not in own:
                raise self._refusal(module, prefix)

    def _refusal(self, module: nn.Module, prefix: str) -> StateError:
        name = self._names.name(prefix.removesuffix("."))
        return StateError(
            f"{self._place.child(name) if name else self._place} ({type(module).__name__}) changes its "
            "state dict, and FSDP has taken parameters out of it",
            remedy="remove its state-dict hooks or its own state_dict, or wrap it with fully_shard (FSDP2)",
        )

    def _require_plain(self, module: nn.Module, prefix: str) -> None:
        """Raise `StateError` for a module's own methods and hooks that change its state dict.

        Their effect on a state dict without FSDP's entries is unknown.
        """
        if WRAPPERS & module._modules.keys():
            return
        own = type(module).state_dict is not nn.Module.state_dict
        if own or torch_private.has_state_dict_hooks(module):
            raise self._refusal(module, prefix)
