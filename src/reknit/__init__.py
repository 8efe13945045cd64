"""Checkpoints for large-model training: save on any layout, load on any other, and trust the bytes."""

import ast
import logging
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from reknit import system as _forks  # noqa: F401 (one before the first call counts, too)
from reknit.errors import UsageError, did_you_mean, typed_known, without_secrets
from reknit.system import without_collections
from reknit.types.entry import REMEDY

__version__ = "0.2.0.dev0"

_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi")  # by the loader, which may read an archive
_HOMES = {
    alias.name: str(statement.module)
    for statement in ast.parse(_STUB).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
"""The module that defines each name."""

__all__ = sorted(_HOMES)


_here = threading.local()
"""Whether this thread is importing the module of a name."""


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Remove passwords and tokens of URLs from a line of the log and its traceback; never raises."""
    try:
        text = record.getMessage()
        if text != (shown := without_secrets(text)):
            record.msg, record.args = shown, ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            if text != (shown := without_secrets(text)):
                # Handlers would format the error itself again.
                record.exc_info, record.exc_text = None, shown
        if record.stack_info:
            record.stack_info = without_secrets(record.stack_info)
    except Exception:  # of a value in the line, or of wrong arguments: handlers report both, with these texts
        record.msg = _without_secrets(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_without_secrets, record.args))
    return True


def _without_secrets(value: object) -> Any:
    return without_secrets(value) if isinstance(value, str) else value


for _name in ("reknit", "reknit.comm"):  # a filter has no effect on loggers below its own
    logging.getLogger(_name).addFilter(_hide_secrets)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if _is_module(name):  # such as reknit.storage, which a name that was used before may have imported
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}", name=name)
    home, inside = _HOMES[name], getattr(_here, "importing", False)
    if home == __name__:
        return import_module(f"reknit.{name}")
    try:
        _here.importing = True
        # Nothing of it is garbage, and a search of all of torch takes 50 ms.
        with typed_known(), without_collections():
            globals()[name] = found = getattr(import_module(home), name)
    except (ImportError, AttributeError) as error:
        if not inside:
            raise
        raise UsageError(
            f"reknit.{name} is used while the same thread imports parts of reknit, which it interrupts, as a "
            f"signal handler does: {error}",
            remedy=REMEDY,
        ) from error
    finally:
        _here.importing = inside
    return found


def _is_module(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None


def _near(name: str) -> str:
    question = None if name.startswith("_") else did_you_mean(name, __all__)
    return f": {question}" if question else ""


def __dir__() -> list[str]:
    return __all__
