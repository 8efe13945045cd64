"""A job that reads with Mosaic Streaming, saves, and goes on with a new loader; prints all samples."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from itertools import islice
from typing import Any

from reknit.frameworks.registry import collect
from tests.frameworks.checkpoint import assemble, load


def without_torchvision() -> None:
    """Let Streaming be imported without torchvision, on whose classes its data sets of images are made."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    for below in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = types.ModuleType(f"torchvision{below}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = lambda image: image  # type: ignore[attr-defined]


def main(folder: str) -> None:
    """Read 64 samples, with a save and a new loader in the middle."""
    without_torchvision()
    import streaming

    with streaming.MDSWriter(out=folder, columns={"n": "int"}) as out:
        for n in range(64):
            out.write({"n": n})

    def make() -> Any:
        dataset = streaming.StreamingDataset(local=folder, batch_size=4, shuffle=True)
        return streaming.StreamingDataLoader(dataset, batch_size=4)

    one = make()
    first = [n for batch in islice(one, 5) for n in batch["n"].tolist()]
    checkpoint = assemble([collect({"data": one}, 0, 1)])
    assert not checkpoint.own
    other = make()
    load({"data": other}, checkpoint)
    print(json.dumps([first, [n for batch in other for n in batch["n"].tolist()]]))


if __name__ == "__main__":
    main(sys.argv[1])
