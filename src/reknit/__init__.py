"""Checkpoints for large-model training: save on any layout, load on any other, and trust the bytes."""

import ast
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from reknit.processes import inherited as _inherited  # noqa: F401 (a fork before the first call counts, too)

_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi")  # by the loader, which may read an archive
_HOMES = {
    alias.name: str(statement.module)
    for statement in ast.parse(_STUB).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
"""The module that defines each name."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = found = version("reknit")
        return found
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}", name=name)
    from reknit.system import without_collections

    home = _HOMES[name]
    with without_collections():  # nothing of what is imported is garbage, and a search of torch takes 50 ms
        found = import_module(f"reknit.{name}") if home == __name__ else getattr(import_module(home), name)
    globals()[name] = found
    return found


def _near(name: str) -> str:
    from reknit.errors import did_you_mean

    is_module = name.startswith("_") or find_spec(f"{__name__}.{name}") is not None  # which comes next
    return "" if is_module or not (question := did_you_mean(name, __all__)) else f": {question}"


def __dir__() -> list[str]:
    return __all__
