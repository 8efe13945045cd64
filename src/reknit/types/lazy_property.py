"""A property that is computed at its first use, without a lock."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    lazy_property = cached_property
else:

    class lazy_property(cached_property):
        """Compute the value of a property at its first use, and keep it.

        `cached_property` of Python 3.11 and before has one lock for a property of all instances.  A process
        that is forked while a thread computes the value would wait for that lock forever.  Here two threads
        may both compute the value, and the last one is kept.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Return the value; the next use finds it in the instance itself."""
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
