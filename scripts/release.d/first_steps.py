"""Take the first steps of a user with an installed reknit, in an empty folder: first_steps.py VERSION."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import reknit


def arrays(number: float) -> dict[str, Any]:
    """Return a state without a framework."""
    return {"model": {"w": np.full(4, number)}, "trainer": {"epoch": int(number)}}


def modules(number: float) -> dict[str, Any]:
    """Return a state of torch, after one step of its optimizer."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=number)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def main(expected: str) -> None:
    """Import, save with and without waiting, load, verify, and call the program."""
    assert version("reknit") == expected, version("reknit")
    assert "site-packages" in str(reknit.__file__), f"{reknit.__file__} is not installed"
    reknit.save("waits", arrays(1.0), step=1)
    reknit.save("goes-on", arrays(2.0), step=2, wait=False).result()
    target = arrays(0.0)
    assert reknit.load("goes-on", target).step == 2
    assert target["model"]["w"].tolist() == [2.0] * 4
    assert target["trainer"]["epoch"] == 2
    assert reknit.verify("waits", "data").ok
    done = ["with arrays"]
    if find_spec("torch") is not None:
        import torch

        saved, target = modules(0.1), modules(0.2)
        reknit.save("torch", saved, step=3, wait=False).result()
        reknit.load("torch", target)
        assert torch.equal(saved["model"].weight, target["model"].weight)
        assert target["optimizer"].param_groups[0]["lr"] == 0.1
        done.append(f"with torch {torch.__version__}")
    program = Path(sys.executable).with_name("reknit")
    for arguments in (["--help"], ["ls", "."]):
        subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)
    print(f"Python {sys.version.split()[0]}: saved and loaded {' and '.join(done)}")


if __name__ == "__main__":
    main(sys.argv[1])
