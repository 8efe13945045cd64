"""Build the second reader with the system's compiler: `python examples/reader/build.py OUT`.

Arrow's headers and libraries are those that the package pyarrow brings, and so is xxHash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow

HERE = Path(__file__).parent


def compiler() -> str | None:
    """Return the C++ compiler of this system, or None."""
    return shutil.which(os.environ.get("CXX", "c++"))


def command(out: Path) -> list[str]:
    """Return the command line that builds the program `out`."""
    found = compiler()
    if found is None:
        raise SystemExit("there is no C++ compiler here: install g++ or clang")
    folder = Path(pyarrow.get_library_dirs()[0])
    version = pyarrow.__version__.split(".")
    suffix = f"{version[0]}{int(version[1]):02}"
    return [
        *(found, "-std=c++20", "-O1", "-Wall", "-Wextra", f"-I{pyarrow.get_include()}"),
        *map(str, sorted(HERE.glob("*.cpp"))),
        *(str(folder / f"lib{name}.so.{suffix}") for name in ("parquet", "arrow")),
        *(f"-Wl,-rpath,{folder}", "-o", str(out)),
    ]


if __name__ == "__main__":
    subprocess.run(command(Path(sys.argv[1])), check=True)
