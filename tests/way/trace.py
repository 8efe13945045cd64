"""The functions of reknit that a process runs, as `sys.setprofile` reports them in all threads."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import CodeType, FrameType

SOURCES = f"{Path(str(getattr(find_spec('reknit'), 'origin', ''))).parent}/"
"""The folder of reknit, which is not imported for it."""
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
OPENED = ("storage/local/store.py", "__init__")
"""The call that opens a local folder."""
WRITER = ("storage/local/writer.py", "__init__")
"""The call that makes the writer of a file."""
STORE_CALLS = {
    "storage/local/store.py": (
        *("create", "copy_from", "put", "commit", "get", "size", "age_s", "read_into", "read_runs"),
        *("delete", "folders", "list"),
    ),
    "storage/local/writer.py": ("write", "finish", "abort"),
}
"""The methods that reach the disk, by their modules."""
WAITS = (threading.__file__, "wait_for")
SHOWS = "reknit-progress"
"""The thread that shows progress, which depends on the time that a call takes."""
RANDOM = re.compile(r"\.[0-9a-f]{8,}")


class StoreCall(NamedTuple):
    """A call of the store: its method, its file, and the number of frames of reknit above it."""

    method: str
    path: str
    frames: int


class Trace:
    """The calls of functions of reknit after `start`, in this thread and in threads that begin later.

    The bodies of classes and modules do not count.  Comprehensions count as calls and frames, but not as
    functions.  A condition that is checked until another thread makes it true counts once.
    """

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.deepest: list[str] = []
        self.opened = 0
        self.store: list[StoreCall] = []
        self._files: dict[int, str] = {}

    def start(self) -> None:
        """Count from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Count no more in this thread, nor in threads that begin later."""
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def functions(self) -> list[CodeType]:
        """The functions that ran."""
        return [code for code in self.calls if code.co_name not in COMPREHENSIONS]

    def idle(self) -> list[str]:
        """Return the imported modules of reknit of which no function ran."""
        ran = {code.co_filename for code in self.functions}
        return [name for name in own_modules() if sys.modules[name].__file__ not in ran]

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCES):
            return
        if threading.current_thread().name == SHOWS:
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class or a module
            return
        self.calls[code] = 1 if is_waiting(frame.f_back) else self.calls[code] + 1
        frames = own_frames(frame)
        self.deepest = max(self.deepest, frames, key=len)
        module, values = code.co_filename.removeprefix(SOURCES), frame.f_locals
        if (module, code.co_name) == OPENED:
            self.opened += 1
        elif (module, code.co_name) == WRITER and "path" in values:
            self._files[id(values["self"])] = values["path"]
        elif code.co_name in STORE_CALLS.get(module, ()):
            path = values.get("path") or self._files.get(id(values["self"]), "")
            self.store.append(StoreCall(code.co_name, RANDOM.sub("", path), len(frames) - 1))


def is_waiting(caller: FrameType | None) -> bool:
    """Return whether a caller repeats its call as often as other threads happen to wake it."""
    return caller is not None and (caller.f_code.co_filename, caller.f_code.co_name) == WAITS


def own_modules() -> list[str]:
    """Return the imported modules of reknit."""
    return sorted(name for name in sys.modules if name.partition(".")[0] == "reknit")


def own_frames(frame: FrameType | None) -> list[str]:
    """Return the frames of reknit on a stack, outermost first, as `module:function`."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCES):
            found.append(f"{frame.f_code.co_filename.removeprefix(SOURCES)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]
