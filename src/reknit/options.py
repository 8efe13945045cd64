"""Every knob of reknit, as frozen keyword-only dataclasses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
GIB = 1 << 30

Durability = Literal["process", "power"]


def local_ranks() -> int:
    """Return how many ranks share this machine, as launchers say it in LOCAL_WORLD_SIZE; 1 if none does."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) else 1


def cores_per_rank() -> int:
    """Return this rank's share of the machine's cores, at least 1."""
    return max(1, (os.cpu_count() or 1) // local_ranks())


def num_threads(wanted: int | None) -> int:
    """Return how many threads a rank uses: `wanted`, or its share of the cores, at least 1 and at most 4.

    More threads than cores make a disk slower.
    """
    if wanted is not None:
        return wanted
    return min(4, cores_per_rank())


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """How ranks reach each other.

    `fan_out`: children per node of the tree.  `bind`: address that this rank's server listens on and that
    other ranks are told, None for the one that this host's name leads to.  `connect_timeout_s`: the longest
    wait for a peer to come up.  `max_message_nbytes`: a larger message is refused.

    Ranks meet once, at the first save or load of a process group; the options of that call count for all
    later ones.
    """

    fan_out: int = 16
    bind: str | None = None
    connect_timeout_s: float = 120.0
    max_message_nbytes: int = GIB

    def __post_init__(self) -> None:
        _require(self.fan_out >= 1, "fan_out must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How `reknit.save` writes.

    `durability`: ``"power"`` survives the loss of all unsynced data (files and directories are fsynced),
    ``"process"`` survives the death of every process but not of the machine.  `threads`: writer threads per
    rank, None for this rank's share of the cores, at most 4, and in the background for the number that a
    quick measurement finds best.  `inflight_nbytes`: bytes of host memory that a synchronous save may use.
    `max_file_nbytes`: a data file rolls over to a next one at this size.
    `check_replicas`: compare the digests of copies that are not written, and warn in the report where they
    differ: ``"guessed"`` only where the framework could not vouch that copies are equal, ``"all"``, or
    ``"off"``.  `allow_pickle`: store values that the blob codec does not know with pickle; recorded in the
    manifest.  `timeout_s`: the longest that a rank waits for the others.  `events`: path of a JSON-lines file
    to which this process appends every phase, or None.  `comm`: how the ranks reach each other.

    `on_error`: with ``"warn"`` a save never raises what went wrong with storage or other ranks; it is logged,
    and `PendingSave.result` still raises it.  A wrong call (`UsageError`) is raised all the same.

    For saves with `wait=False` only: `stage` is ``"eager"`` (the state may be changed once `save` returns) or
    ``"lazy"`` (once `PendingSave.staged` returns; see `reknit.fence`).  `when_busy`: what to do while two
    earlier saves still occupy the host memory: ``"wait"``, or ``"skip"`` this save.  `host_nbytes`: bytes of
    host memory that a rank may keep for staging, None for half of what the host has free, divided by its
    ranks.  `piece_nbytes`: bytes written at once, None for what a quick measurement finds best.  `priority`:
    with ``"low"`` the writing process gives way to training when both want the processor or the disk.
    `exit_wait_s`: the longest that the end of the interpreter waits for saves under way; those staged by then
    are finished by their agents all the same.  What agents and memory are made with (`comm`, `priority`,
    `host_nbytes`) counts from the first such save on.
    """

    durability: Durability = "power"
    threads: int | None = None
    inflight_nbytes: int = 64 * MIB
    max_file_nbytes: int = 16 * GIB
    check_replicas: Literal["guessed", "all", "off"] = "guessed"
    allow_pickle: bool = False
    timeout_s: float = 1800.0
    events: str | None = None
    comm: CommOptions = field(default_factory=CommOptions)
    on_error: Literal["raise", "warn"] = "raise"
    stage: Literal["eager", "lazy"] = "eager"
    when_busy: Literal["wait", "skip"] = "wait"
    host_nbytes: int | None = None
    piece_nbytes: int | None = None
    priority: Literal["low", "normal"] = "low"
    exit_wait_s: float = 300.0

    def __post_init__(self) -> None:
        _require(
            self.durability in ("process", "power"),
            f"durability is 'process' or 'power', not {self.durability!r}",
        )
        _require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        _require(self.inflight_nbytes >= 16 * MIB, "inflight_nbytes must be at least 16 MiB")
        _require(self.max_file_nbytes >= MIB, "max_file_nbytes must be at least 1 MiB")
        _require(
            self.check_replicas in ("guessed", "all", "off"),
            "check_replicas is 'guessed', 'all' or 'off'",
        )
        _require(self.timeout_s > 0, "timeout_s must be positive")
        _require(self.on_error in ("raise", "warn"), f"on_error is 'raise' or 'warn', not {self.on_error!r}")
        _require(self.stage in ("eager", "lazy"), f"stage is 'eager' or 'lazy', not {self.stage!r}")
        _require(self.when_busy in ("wait", "skip"), f"when_busy is 'wait' or 'skip', not {self.when_busy!r}")
        _require(
            self.host_nbytes is None or self.host_nbytes >= 64 * MIB, "host_nbytes must be at least 64 MiB"
        )
        _require(
            self.piece_nbytes in (None, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB),
            "piece_nbytes is 4, 8, 16 or 32 MiB",
        )
        _require(self.priority in ("low", "normal"), f"priority is 'low' or 'normal', not {self.priority!r}")
        _require(self.exit_wait_s >= 0, "exit_wait_s must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How `reknit.load` reads.

    `verify`: ``"touched"`` checks the digest of every block that is read, ``"off"`` reads only the bytes
    wanted.  `cast`: convert where the saved dtype differs from the target's, instead of refusing.  `lenient`:
    patterns (``fnmatch`` on ``item/fqn``) in which missing, unexpected or mismatched entries are reported
    instead of refused; `strict=False` is the pattern ``*``.  `threads`: reader threads per rank, None for
    this rank's share of the cores, at most 4.  `inflight_nbytes`: bytes of host memory for reads that cannot
    go straight into their target.  `gap_nbytes`: with `verify="off"`, holes up to this size between wanted
    runs are read over.  `allow_pickle`: unpickle values that were saved with `allow_pickle`.  Only for
    checkpoints that you trust.  `timeout_s`: the longest that a rank waits for the others.  `events`: path of
    a JSON-lines file to which this process appends every phase, or None.  `comm`: how the ranks reach each
    other.
    """

    verify: Literal["touched", "off"] = "touched"
    cast: bool = False
    lenient: tuple[str, ...] = ()
    threads: int | None = None
    inflight_nbytes: int = 256 * MIB
    gap_nbytes: int = 256 << 10
    allow_pickle: bool = False
    timeout_s: float = 1800.0
    events: str | None = None
    comm: CommOptions = field(default_factory=CommOptions)

    def __post_init__(self) -> None:
        _require(self.verify in ("touched", "off"), f"verify is 'touched' or 'off', not {self.verify!r}")
        _require(not isinstance(self.lenient, str), "lenient is a tuple of patterns, not one string")
        _require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        _require(self.inflight_nbytes >= 16 * MIB, "inflight_nbytes must be at least 16 MiB")
        _require(self.gap_nbytes >= 0, "gap_nbytes must not be negative")
        _require(self.timeout_s > 0, "timeout_s must be positive")


def quiet_grpc() -> None:
    """Keep gRPC, before its first import, from telling users that a peer ended."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def agent_environment(search_path: Sequence[str]) -> dict[str, str]:
    """Return the environment of an agent process that finds modules where this process does."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in search_path)
    environment["PYTHONSAFEPATH"] = "1"  # no module of the working folder takes the place of another
    # Importing NumPy would else start a thread per core, for algebra that an agent never does.
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    return environment
