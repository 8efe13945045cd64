"""The names in a module tree, without wrappers such as torch.compile, FSDP1 and DDP."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reknit.frameworks.torch.dtensor import is_dtensor
from reknit.frameworks.torch.modules import ddp, fsdp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from reknit.frameworks.torch.modules.extension import ModuleExtension
    from reknit.frameworks.walk.walk import World

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes by which torch.compile, activation checkpointing and FSDP hold the module that they wrap."""


class ModuleNames:
    """The names of a module tree without its wrappers.

    `modules` are all modules by name, `flattened` the FSDP1 units with their paths, and `root` the module
    inside all wrappers around the tree, with the path to it.
    """

    def __init__(self, module: nn.Module, extensions: Sequence[ModuleExtension] = ()) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.root: tuple[nn.Module, tuple[str, ...]] = (module, ())
        self.flattened: list[tuple[str, nn.Module]] = []
        self._extensions = extensions
        self._wrapped: list[tuple[tuple[str, ...], nn.Module]] = []
        kinds: dict[type[nn.Module], tuple[bool, bool]] = {}
        for path, inner in module.named_modules(remove_duplicate=False):
            elements = _stripped(path)
            if (kind := kinds.get(type(inner))) is None:
                kind = kinds[type(inner)] = ddp.is_wrapper(inner, extensions), fsdp.is_wrapper(inner)
            is_parallel, is_flattened = kind
            if is_parallel:
                self._wrapped.append((elements, inner))
            if is_flattened:
                self.flattened.append((path, inner))
            # A wrapper and the module in it have one name; the innermost comes last, and the name is its own.
            self.modules[name := ".".join(self._cut(elements))] = inner
            if not name:
                self.root = (inner, tuple(path.split(".")) if path else ())
        self._wrapped.sort(key=lambda pair: -len(pair[0]))

    def name(self, key: str) -> str:
        """Return a state-dict key or parameter name without wrappers."""
        return ".".join(self._cut(_stripped(key))) if self._wrapped else without_wrappers(key)

    def claim(self, key: str, tensor: Any, *, is_buffer: bool, world: World) -> ddp.Claim | None:
        """Return the claim of the innermost data-parallel wrapper around a tensor, or None.

        DTensors have their own record of replicas.
        """
        if is_dtensor(tensor):
            return None
        elements = _stripped(key)
        for path, wrapper in self._wrapped:
            if elements[: len(path) + 1] == (*path, "module"):
                name = ".".join(elements[len(path) + 1 :])
                ignored = {without_wrappers(other) for other in getattr(wrapper, "parameters_to_ignore", ())}
                ranks = ddp.ranks(wrapper, self._extensions)
                return ddp.claim(wrapper, ranks, ignored=name in ignored, is_buffer=is_buffer, world=world)
        return None

    def _cut(self, elements: tuple[str, ...]) -> tuple[str, ...]:
        if not self._wrapped:
            return elements
        dropped = {len(path) for path, _ in self._wrapped if elements[: len(path) + 1] == (*path, "module")}
        return tuple(element for n, element in enumerate(elements) if n not in dropped)


@lru_cache(maxsize=1 << 16)
def without_wrappers(name: str) -> str:
    """Return a parameter's name without the attributes by which wrappers hold a module."""
    return ".".join(_stripped(name))


@lru_cache(maxsize=1 << 16)
def _stripped(path: str) -> tuple[str, ...]:
    """Return the elements of a path without those of wrappers; the same at every save."""
    return tuple(element for element in path.split(".") if element not in WRAPPERS) if path else ()
