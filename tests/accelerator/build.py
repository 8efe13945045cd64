"""How is the simulated device built?  Once, into a folder named after all that the result depends on."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from reknit.environment import programs_beside_python
from reknit.errors import UsageError

_HERE = Path(__file__).parent
_NAME = "reknit_simulated_device"
_FLAGS = ["-O0", "-g0", "-fvisibility=hidden", "-Wno-attributes"]
"""Without optimization, which would double the time of the build and which the device does not need."""


def why_not() -> str | None:
    """Return why the device cannot be built here, or None."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return "the simulated device needs torch"
    if torch.version.cuda or torch.version.hip:
        return "the simulated device needs a torch that was built for the CPU only"
    if _library(_folder()).exists():
        return None
    compiler = _compiler()
    with programs_beside_python():
        if shutil.which(compiler) is None:
            return f"the simulated device needs a C++ compiler, and there is no {compiler!r} here"
        if not cpp_extension.is_ninja_available():
            return "the simulated device needs ninja: pip install ninja"
    return None


def build() -> Any:
    """Return the module of the device, compiled first if nobody has done so; that takes up to a minute.

    Raises `UsageError` where something is missing, and RuntimeError with the compiler's output if it fails.
    """
    if reason := why_not():
        raise UsageError(reason, remedy="install it, or leave out the tests that need the simulated device")
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second builder waits for the first
        if not _library(folder).exists():
            return _compiled(folder)
    return _imported(_library(folder))


def _folder() -> Path:
    """Return the folder of the result: another for each version of torch, Python and the sources."""
    import torch
    from torch.utils import cpp_extension

    parts = [torch.__version__, sys.version, " ".join(_FLAGS), _compiler()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    return Path(cpp_extension.get_default_build_root(), f"{_NAME}-{digest.hexdigest()[:16]}")


def _compiler() -> str:
    from torch.utils import cpp_extension

    return str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]


def _library(folder: Path) -> Path:
    return folder / f"{_NAME}.so"


def _compiled(folder: Path) -> Any:
    """Build beside the folder and rename at the end, so that a build that is killed leaves no folder."""
    from torch.utils import cpp_extension

    scratch = tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent)
    try:
        with programs_beside_python():
            module = cpp_extension.load(
                name=_NAME,
                sources=[str(path) for path in sorted(_HERE.glob("*.cpp"))],
                extra_cflags=_FLAGS,
                build_directory=scratch,
            )
        for path in Path(scratch).glob("*.o"):
            path.unlink()
        os.rename(scratch, folder)
        return module
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
