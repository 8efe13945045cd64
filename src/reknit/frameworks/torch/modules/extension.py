"""Support of libraries on top of torch for their changes to torch's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from reknit.frameworks.torch.modules.flat_parameter import FlatParameter
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place, World


class ModuleExtension(Protocol):
    """A library that wraps torch's modules, or keeps their parameters in parts."""

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module puts ``module.`` before the names of the module that it wraps."""

    def ranks(self, wrapper: Any) -> tuple[int, ...]:
        """Return the job-wide ranks among which a wrapper of this library averages gradients."""

    def require_readable(self, module: nn.Module, place: Place) -> None:
        """Raise `StateError` for modules and parameters whose names or layouts cannot be determined."""

    def is_partitioned(self, parameter: Any) -> bool:
        """Return whether each rank keeps a part of this parameter."""

    def partitioned(
        self, parameter: Any, names: tuple[str, ...], place: Place, world: World
    ) -> FlatParameter:
        """Return this rank's part of such a parameter.  Raises `StateError` if it cannot be determined."""

    def follow(self, parameters: list[tuple[Any, Place]], place: Place, loading: Loading) -> None:
        """Refresh the library's copies of these parameters of a module, once they are loaded."""
