"""Run one of Swift's servers with all of its configuration in one folder: FOLDER, and which server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.pop(0)  # this folder, in which a file is called swift too

from swift.common.utils import set_swift_dir
from swift.common.wsgi import run_wsgi

folder, name = Path(sys.argv[1]), sys.argv[2]
# Swift looks for this where the system keeps such things, and takes no other word for it on its command line.
set_swift_dir(str(folder))
if name == "proxy":
    sys.exit(run_wsgi(str(folder / "proxy.conf"), "proxy-server", verbose=True))
sys.exit(run_wsgi(str(folder / f"{name}.conf"), f"{name}-server", verbose=True))
