"""A folder that can be as slow as the demo needs it; run as a script it runs another one with such folders.

While there is a file `{checkpoint}.hold` beside the folder of a checkpoint, no data file is begun in it.
Whoever opens ``held:///...``, trainer or agent, waits for that file to go.  A file `delay` beside it holds
the seconds by which each data file is late.

    python held_store.py train --root held:///tmp/run
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register

if TYPE_CHECKING:
    from reknit.options import Durability
    from reknit.storage.local.writer import LocalWriter

SCHEME = "held"


class HeldFolder(LocalStorage):
    """A local folder in which files are begun only when nobody holds it, and then as late as wanted."""

    def create(self, path: str, nbytes: int) -> LocalWriter:
        """Start a new file, as soon as that is allowed."""
        hold = Path(f"{self.url}.hold")
        while hold.exists():
            time.sleep(0.005)
        delay = Path(self.url).with_name("delay")
        if delay.exists():
            time.sleep(float(delay.read_text()))
        return super().create(path, nbytes)


def open_held(url: str, durability: Durability) -> HeldFolder:
    """Open ``held:///folder``.  A plain function of a module: an agent can import it, too."""
    return HeldFolder(url.removeprefix(f"{SCHEME}://"), durability=durability)


if __name__ == "__main__":
    import held_store  # once more, under the name that agents import it by

    register(SCHEME, held_store.open_held)
    importlib.import_module(sys.argv.pop(1)).main()
