"""One request of a load: memory to fill, and the names that it has in the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place, View


@dataclass(slots=True)
class Request:
    """Memory to fill, with all its names in the target; with `resize`, also from another shape.

    If the checkpoint has none of these names, the load looks for those in `instead`.  What is `early` is
    filled before live memory.
    """

    view: View
    tensor: Any
    resize: bool = False
    early: bool = False
    places: list[Place] = field(default_factory=list)
    instead: list[Place] = field(default_factory=list)
