from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.errors import StateError
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable


def without_memory(folder: str) -> list[str]:
    """Save and load tensors of a device that shows no memory, as XLA; return the errors."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
    here: Any = {"m": {"x": torch.ones(2, 3, device="lazy"), "y": torch.ones(2, 3, device="lazy")}}
    model = torch.nn.Linear(2, 2).to("lazy")
    path = Path(folder)
    reknit.save(
        path / "x", {"m": {"x": torch.zeros(2, 3), "y": torch.zeros(2, 3)}, "n": torch.nn.Linear(2, 2)}
    )
    calls: list[Callable[[], object]] = [
        lambda: reknit.save(path / "y", here),
        lambda: reknit.save(path / "y", here, wait=False).result(),
        lambda: reknit.save(path / "y", {"m": model}),
        lambda: reknit.load(path / "x", here),
        lambda: reknit.load(path / "x", {"n": model}),
    ]
    errors = []
    for call in calls:
        with pytest.raises(StateError) as caught:
            call()
        errors.append(str(caught.value).partition(" [")[0])
    assert not list(path.glob("y/**/manifest*"))
    assert here["m"]["x"].cpu().eq(1).all()
    return errors


def test_a_device_that_shows_no_memory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (errors,) = run(1, without_memory, str(tmp_path), joined=False)
    assert errors == [
        f"{name} is on lazy:0, where torch shows no memory of it"
        for name in ("m/x", "m/x", "m/weight", "m/x", "n/weight")
    ]
