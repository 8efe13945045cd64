"""Torch for CUDA on a host without CUDA: libraries of the names that it links, in which no device is found.

A wheel of torch for CUDA links twenty libraries of several gigabytes, which tests on the CPU never call.
These stubs have the same names, symbols and versions, in a few kilobytes:

python -m tests.nightly.cuda_stubs VENV
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_NEEDED = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]*)\]")
_SYMBOL = re.compile(
    r"^(?:__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|curand|cusolver|cusparse|cupti|nccl|nvrtc|nvshmem)\w*$"
)
_NO_DEVICE = 100
"""The answer of the driver and the runtime of CUDA on a host without a device."""


def make(libraries: Path, folder: Path) -> list[str]:
    """Make stubs of all CUDA libraries that the libraries in a folder of torch need; return their names."""
    needed: set[str] = set()
    symbols: dict[str, set[str]] = defaultdict(set)
    for library in sorted(libraries.glob("*.so*")):
        needed.update(_NEEDED.findall(_output("readelf", "--dynamic", str(library))))
        for line in _output("nm", "--dynamic", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if _SYMBOL.match(name):
                symbols[version.lstrip("@")].add(name)
    needed = {name for name in needed if not (libraries / name).exists()}
    unversioned = sorted(symbols[""] | set().union(*(symbols[v] for v in symbols.keys() - needed)))
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(sorted(needed)):
        _compile(folder / name, sorted(symbols[name]), unversioned if number == 0 else [])
    return sorted(needed)


def _compile(path: Path, versioned: list[str], unversioned: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "versions")
        source.write_text(
            "\n".join(_function(name) for name in {*versioned, *unversioned}) + "\nint _stub;\n"
        )
        parts = (
            [f"{path.name} {{ global: {' '.join(f'{name};' for name in versioned)} }};"] if versioned else []
        )
        script.write_text("\n".join(parts) or "{ global: *; };")
        names = [f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}"]
        command = ["cc", "-shared", "-fPIC", "-w", *names, "-o", str(path), str(source)]
        subprocess.run(command, check=True)


def _function(name: str) -> str:
    if name.endswith(("String", "Name")):
        return f'const char *{name}(void) {{ return "no device"; }}'
    # Binaries for devices are registered when the library is loaded, which has to succeed.
    return f"long {name}(void) {{ return {0 if name.startswith('__') else _NO_DEVICE}; }}"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _main(venv: Path) -> None:
    (torch,) = venv.glob("lib/python*/site-packages/torch/lib")
    # Beside the libraries of torch, where these look first.
    print(" ".join(make(torch, torch)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
