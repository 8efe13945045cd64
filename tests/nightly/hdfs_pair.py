"""An HDFS with two NameNodes: the active one may be killed, and the other takes over."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from tests.servers import STATE
from tests.stores.hdfs_probes import Cluster, hdfs_server

if TYPE_CHECKING:
    from pathlib import Path

_POLL_S = 0.1
_UP_S = 60.0


class Pair(Cluster):
    """Two NameNodes, nn1 and nn2, with a DataNode."""

    def __init__(self, folder: Path) -> None:
        parts = hdfs_server()
        home = STATE / "hdfs"
        home.mkdir(parents=True, exist_ok=True)
        parts.install(home)
        self._parts = parts
        self.server: dict[str, Any] = parts.lay_out_pair(home, folder, 1)
        self._running = {}
        self.active: str | None = None
        for node in self.server["nodes"]:
            self.launch(node)
        self.wait_for("nn1", "nn2")
        self.promote("nn1")

    @property
    def standby(self) -> str:
        """Return the NameNode that takes over."""
        return "nn2" if self.active == "nn1" else "nn1"

    def kill(self, *nodes: str) -> None:
        """Kill processes by SIGKILL."""
        for node in nodes:
            self.send(node, signal.SIGKILL)
            self._running[node].wait()

    def fail_over(self) -> None:
        """Kill the active NameNode, and let the other take over, by a command that takes 2 s."""
        assert self.active is not None
        other = self.standby
        self.kill(self.active)
        self.promote(other)

    def restore(self) -> None:
        """Start the killed processes again, and wait until all serve as at first."""
        for node in ("nn1", "nn2"):
            if self._running[node].poll() is not None:
                self.launch(node)
        self.wait_for("nn1", "nn2")
        if self.active is None:
            self.promote("nn1")

    def promote(self, node: str) -> None:
        """Make a NameNode the active one; the other has to be standby, or dead."""
        command = [*self.server["admin"], "-transitionToActive", "--forceactive", node]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.active = node
        self._until(lambda: self._bean(node, "NameNodeStatus")["State"] == "active", node)
        self._until(lambda: self._bean(node, "FSNamesystemState")["NumLiveDataNodes"] == 1, node)
        self._until(lambda: self._bean(node, "FSNamesystemState")["FSState"] == "Operational", node)

    def wait_for(self, *nodes: str) -> None:
        """Wait until NameNodes answer, and have left their safe mode."""
        for node in nodes:
            self._until(lambda node=node: self._bean(node, "NameNodeStatus")["State"] != "initializing", node)
            self._until(
                lambda node=node: self._bean(node, "FSNamesystemState")["FSState"] == "Operational", node
            )

    def _bean(self, node: str, bean: str) -> dict[str, Any]:
        found: dict[str, Any] = self._parts.jmx({"http": self.server["web"][node]}, bean)
        return found

    def _until(self, holds: Any, node: str) -> None:
        end = time.monotonic() + _UP_S
        while True:
            try:
                if holds():
                    return
            except (OSError, RuntimeError):  # it is not up yet
                pass
            assert time.monotonic() < end, f"see {self.server['folder']}/log/{node}"
            time.sleep(_POLL_S)
