"""Store enumeration members by name; load them only if the program already has the enumeration."""

from __future__ import annotations

import enum
import sys
from typing import Any

from reknit.errors import shown
from reknit.format.values.refused import RefusedError, fields
from reknit.types.shard import Tagged

TAG = "enum"
"""Tag of a member that the loading program does not have."""


def take_enum(value: enum.Enum) -> list[str]:
    """Return module, qualified name and member name."""
    kind = type(value)
    if find_enum(kind.__module__, kind.__qualname__) is not kind:
        raise RefusedError(
            f"a member of the enum {kind.__qualname__}, which cannot be found again by its name",
            "define the enum at the top of a module, or save value.value",
        )
    name = value.name
    if kind.__members__.get(name) is not value:
        raise RefusedError(f"{shown(value)}, a combination of flags without a name", "save value.value")
    return [kind.__module__, kind.__qualname__, name]


def build_enum(payload: Any) -> Any:
    """Return the member, or `Tagged(TAG, [module, qualified name, member])` where nothing has that name."""
    module, qualname, name = fields(payload, str, str, str)
    kind = find_enum(module, qualname)
    member = None if kind is None else kind.__members__.get(name)
    return Tagged(TAG, payload) if member is None else member


def find_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """Return an enumeration of a module that is already imported; nothing is imported or run for it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # through the namespace itself: an attribute access could run a lazy module's or a descriptor's code
        found = vars(found).get(name) if isinstance(found, (type(sys), type)) else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None
