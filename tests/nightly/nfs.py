"""NFS 3 and 4.2 with Linux's own server and clients: ``python -m tests.nightly.nfs``.

Runs in the machine of scripts/servers.d/nfs.py: the suite that all stores pass, promises between two hosts,
full disks, servers that stop and start again, and ``reknit certify-storage``.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

from tests.nightly.machine import Machine

# One after the other, since the first stops the server at times.
ORDERS = {
    "on_nfs.py": "{bin}/python -m pytest -q -p no:cacheprovider tests/nightly/on_nfs.py",
    "certify-storage, NFS 3": '{bin}/reknit certify-storage "$VIEWS/a-v3"',
    "certify-storage, NFS 4.2": '{bin}/reknit certify-storage "$VIEWS/b-v4"',
}


def main() -> int:
    """Run all; fail when any did."""
    machine = Machine()
    machine.down()
    machine.up()
    failed = []
    try:
        for name, order in ORDERS.items():
            begin = time.monotonic()
            code, said = machine.run(order.format(bin=shlex.quote(str(Path(sys.executable).parent))), 1500)
            print(f"{said}\n-- {name}: exit status {code} after {time.monotonic() - begin:.0f} s", flush=True)
            if code:
                failed.append(name)
    finally:
        machine.down()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
