"""The faults of a simulated job, as values that a command line can repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reknit.testing.faulty_storage import Fault
    from tests.simulation.network import Network
    from tests.simulation.process import Process


@dataclass(frozen=True, slots=True)
class Crash:
    """A rank of the `run`-th incarnation dies at its `step`-th step.

    Its neighbours see their connections to it break soon after, unless the death is `silent`, as when the
    whole machine loses its power.
    """

    rank: int
    step: int
    silent: bool = False
    run: int = 0

    def strike(self, process: Process, network: Network) -> None:
        """Let it happen."""
        process.die(silent=self.silent)


@dataclass(frozen=True, slots=True)
class Stop:
    """A rank does nothing for so many seconds, from a step on, and then goes on."""

    rank: int
    step: int
    seconds: float
    run: int = 0

    def strike(self, process: Process, network: Network) -> None:
        """Let it happen."""
        process.stop(self.seconds)


@dataclass(frozen=True, slots=True)
class Interrupt:
    """A user presses Ctrl-C at a step of a rank."""

    rank: int
    step: int
    run: int = 0

    def strike(self, process: Process, network: Network) -> None:
        """Let it happen."""
        process.interrupt(KeyboardInterrupt())


@dataclass(frozen=True, slots=True)
class Cut:
    """From a step of a rank on, the connection to the rank above it carries nothing.

    Both ends notice it after `noticed_s` seconds, or never.
    """

    rank: int
    step: int
    noticed_s: float | None = None
    run: int = 0

    def strike(self, process: Process, network: Network) -> None:
        """Let it happen."""
        network.cut(process, self.noticed_s)


AT_STEP = (Crash, Stop, Interrupt, Cut)
"""Faults of a rank at one of its steps."""


@dataclass(frozen=True, slots=True)
class DiskFault:
    """A storage operation of a rank fails; a ``stall`` takes `stall_s` seconds."""

    rank: int
    fault: Fault
    stall_s: float = 1.0
    run: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """From a moment on these ranks and the others receive nothing from each other for so many seconds.

    Their messages arrive afterwards if they are `kept`.
    """

    ranks: tuple[int, ...]
    at_s: float
    seconds: float
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Restart:
    """The job is started again at a moment, with a higher generation, while its older processes go on."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Weather:
    """The network: delays of messages, and the shares that are slow, lost, doubled or stray.

    A message takes `delay_s` seconds on average, a slow one `slow_s`.  A doubled message arrives again after
    about `slow_s`, and perhaps again (so `doubled` is less than 1).  Messages overtake each other.  A stray
    message also arrives at the process of the same rank in the newest incarnation of the job.
    """

    delay_s: float = 0.001
    slow_s: float = 1.0
    slow: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    strayed: float = 0.0


SimFault = Crash | Stop | Interrupt | Cut | DiskFault | Partition | Restart | Weather
