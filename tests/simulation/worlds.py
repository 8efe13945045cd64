"""Worlds that a seed chooses: the number of ranks, their tree, their saves, and the faults."""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING, TypedDict, cast, get_args

from reknit.testing.faulty_storage import Fault, FaultKind
from tests.simulation.simulator import (
    Crash,
    Cut,
    DiskFault,
    Interrupt,
    Partition,
    Restart,
    Save,
    Stop,
    Weather,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.faults import SimFault


class World(TypedDict):
    """The arguments of `simulate`, without the seed."""

    ranks: int
    fan_out: int
    hosts: tuple[int, ...]
    saves: tuple[Save, ...]
    faults: tuple[SimFault, ...]
    timeout_s: float


def world(seed: int) -> World:
    """Return the world of a seed."""
    random = Random(f"world {seed}")
    ranks = random.choice((2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, 8, 12, random.choice((8, 24))))
    num_hosts = random.randint(1, ranks)
    return World(
        ranks=ranks,
        fan_out=random.choice((1, 2, 2, 3, 16)),
        hosts=tuple(random.randrange(num_hosts) for _ in range(ranks)),
        saves=_saves(random),
        faults=_faults(random, ranks),
        timeout_s=random.choice((1.0, 5.0, 30.0)),
    )


def _saves(random: Random) -> tuple[Save, ...]:
    count = random.choice((1, 1, 2, 3))
    if random.random() < 0.8:
        return (Save(),) * count
    return tuple(Save(f"step_{number}", overwrite=random.random() < 0.5) for number in range(count))


def _faults(random: Random, ranks: int) -> tuple[SimFault, ...]:
    kinds: list[tuple[float, Callable[[Random, int, int], SimFault]]] = [
        (4, _crash),
        (3, _stop),
        (3, _cut),
        (1, _interrupt),
        (3, _disk_fault),
        (1, _partition),
    ]
    again = random.random() < 0.4
    kind = random.random()
    if kind < 0.1:
        return _bearable(random, ranks)
    if kind < 0.25:
        return _zombies(random, ranks)
    weights = [weight for weight, _ in kinds]
    faults: list[SimFault] = []
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 5))):
        run = 1 if again and random.random() < 0.3 else 0
        faults.append(random.choices([kind for _, kind in kinds], weights)[0](random, ranks, run))
    if again:
        faults.append(Restart(random.choice((0.02, 0.05, 0.1, 0.5, 5.0)) * random.uniform(0.5, 2)))
    if random.random() < 0.5:
        faults.append(_weather(random, again))
    return tuple(faults)


def _bearable(random: Random, ranks: int) -> tuple[SimFault, ...]:
    """Return faults that must not make a save fail: ranks stop for a moment, messages are late or doubled."""
    stop = Stop(_rank(random, ranks), _step(random), 0.3)
    return stop, Weather(delay_s=0.0005, slow_s=0.02, slow=0.1, doubled=0.8)


def _zombies(random: Random, ranks: int) -> tuple[SimFault, ...]:
    """Return faults of ranks that stop, and wake up while the restarted job saves."""
    seconds = random.choice((0.3, 3.0, 40.0))
    root = Stop(0, _step(random), seconds)
    others = tuple(
        Stop(_rank(random, ranks), _step(random), seconds) for _ in range(random.choice((0, 0, 1, 3)))
    )
    return root, *others, Restart(seconds + random.uniform(-0.15, 0.25)), _weather(random, again=True)


def _step(random: Random) -> int:
    """Return a step, mostly within the first save."""
    return int(random.choice((10, 40, 80, 200)) * random.random()) + 1


def _rank(random: Random, ranks: int) -> int:
    """Return a rank, often the root."""
    return 0 if random.random() < 0.3 else random.randrange(ranks)


def _crash(random: Random, ranks: int, run: int) -> SimFault:
    return Crash(_rank(random, ranks), _step(random), random.random() < 0.3, run)


def _stop(random: Random, ranks: int, run: int) -> SimFault:
    seconds = random.choice((0.05, 0.5, 3.0, 40.0, 200.0, inf))
    return Stop(_rank(random, ranks), _step(random), seconds, run)


def _cut(random: Random, ranks: int, run: int) -> SimFault:
    return Cut(_rank(random, ranks), _step(random), random.choice((None, 0.01, 0.5, 20.0)), run)


def _interrupt(random: Random, ranks: int, run: int) -> SimFault:
    return Interrupt(_rank(random, ranks), _step(random), run)


def _disk_fault(random: Random, ranks: int, run: int) -> SimFault:
    kind = cast("FaultKind", random.choice([kind for kind in get_args(FaultKind) if kind != "kill"]))
    operation = random.choice(
        (None, None, "create", "write", "finish", "put", "get", "size", "list", "delete")
    )
    stall_s = random.choice((0.1, 3.0, 100.0))
    at = random.randint(1, 20) if operation is None else random.randint(1, 3)
    return DiskFault(_rank(random, ranks), Fault(kind, at, operation), stall_s, run)


def _partition(random: Random, ranks: int, run: int) -> SimFault:
    some = tuple(sorted(random.sample(range(ranks), random.randint(1, ranks - 1))))
    return Partition(some, random.random() * 0.2, random.choice((0.1, 2.0, 100.0)), random.random() < 0.5)


def _weather(random: Random, again: bool) -> Weather:
    return Weather(
        delay_s=random.choice((0.0001, 0.001, 0.02)),
        slow_s=random.choice((0.05, 1.0, 10.0)),
        slow=random.choice((0.0, 0.1, 0.5)),
        lost=random.choice((0.0, 0.0, 0.02, 0.2)),
        doubled=random.choice((0.0, 0.2, 0.7)),
        strayed=random.choice((0.0, 0.5)) if again else 0.0,
    )
