"""Every option, as frozen dataclasses, with the calls that read it."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from reknit.errors import shown
from reknit.keywords import checked_call, is_text
from reknit.locations import Events, absolute, check_events, is_location
from reknit.options.fields import check_patterns, check_values, option, require

MIB = 1 << 20
LEAST_INFLIGHT_NBYTES = 16 * MIB
GIB = 1 << 30

Durability = Literal["process", "power"]

ANYWHERE = ("0.0.0.0", "::")
"""The addresses that stand for all that a host has."""

UNIX = "unix"
"""A value in the place of an address, for a socket in a folder that only this user can enter."""


@runtime_checkable
class Transform(Protocol):
    """A rule of `reknit.transforms`."""

    @property
    def optional(self) -> bool:
        """Whether it may match nothing."""

    def inverse(self) -> Transform:
        """Return the rule that leads back."""


@checked_call
@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Certificates by which ranks identify each other, as paths of PEM files."""

    ca: str | os.PathLike[str]
    """Certificates of authorities; a process with a certificate signed by one of them can take part."""
    certificate: str | os.PathLike[str]
    """This rank's certificate, for both directions, followed by the intermediate ones."""
    key: str | os.PathLike[str]
    """The key of `certificate`, without a password."""
    server_name: str | None = None
    """A name in every rank's certificate; without it each certificate names its rank's address."""

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            require(
                isinstance(path, (str, os.PathLike)) and path != "", f"tls.{name} is a path, not {path!r}"
            )
            # Agents read the files too, from wherever they run.
            object.__setattr__(self, name, absolute(path))
        require(
            self.server_name is None or is_text(self.server_name),
            f"tls.server_name is a name, not {self.server_name!r}",
        )


@checked_call
@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """How ranks reach each other.  The first save or load of a group decides for all later ones."""

    # Addresses
    bind: str | None = option(None, "connect", "start")
    """Address to listen on; ``"0.0.0.0"`` for all, ``"unix"`` for this host only, None to choose."""
    interface: str | None = option(None, "connect", "start")
    """Network interface to listen on, in the place of `bind`."""
    tls: Tls | None = option(None, "connect", "start")
    """Certificates; None for plain connections, which any listener in the network can read."""

    # The tree of ranks
    fan_out: int = option(16, "connect", "start")
    """Children of each rank in the tree; the value of rank 0 counts."""
    connect_timeout_s: float = option(120.0, "connect", "start")
    """Longest wait for another rank to come up."""
    max_message_nbytes: int = option(GIB, "connect", "start")
    """A larger message is refused."""
    generation: int | None = option(None, "connect", "start")
    """Number of this run of the job, higher in each; None for the time at which the ranks met."""

    def __post_init__(self) -> None:
        check_values(self)
        require(self.fan_out >= 1, "fan_out must be at least 1")
        require(self.connect_timeout_s > 0, "connect_timeout_s must be positive")
        for name in ("bind", "interface"):
            text = getattr(self, name)
            require(text is None or (isinstance(text, str) and text != ""), f"{name} is a text, not {text!r}")
        require(
            self.interface is None or self.bind is None or self.bind in ANYWHERE,
            f"bind={self.bind!r} and interface={self.interface!r} may differ: give one of them",
        )
        require(
            self.generation is None or (type(self.generation) is int and 0 <= self.generation < 1 << 63),
            f"generation is a whole number from 0 on, or None, not {self.generation!r}",
        )
        require(
            self.tls is None or self.bind != UNIX,
            "bind='unix' reaches nobody who would need certificates: leave out bind or tls",
        )
        tls: Any = self.tls
        if isinstance(tls, Mapping):  # from `dataclasses.asdict`, on its way to an agent
            object.__setattr__(self, "tls", Tls(**tls))
        require(
            self.tls is None or isinstance(self.tls, Tls),
            f"tls is a reknit.Tls, not {type(self.tls).__name__}",
        )


@checked_call
@dataclass(frozen=True, slots=True)
class PromotionTarget:
    """A second place of a checkpoint, and how many bytes per second go there, by all ranks together."""

    path: str | os.PathLike[str]
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        require(
            is_location(self.path) and self.path != "",
            f"promote_to is a path or a URL, or several, not {self.path!r}",
        )
        check_rate(self.bytes_per_s)


_Place = str | os.PathLike[str] | PromotionTarget


@checked_call
@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How `reknit.save` writes."""

    # Content
    check_replicas: Literal["sample", "all", "warn", "off"] = option("sample", "save", "background", "agent")
    """How copies of a tensor are compared: by 8 KiB, in full, by 8 KiB and only with a warning, or not."""
    allow_pickle: bool = option(False, "save", "background", "agent")
    """Store values of unknown types with pickle; the manifest says so."""
    max_file_nbytes: int = option(16 * GIB, "save", "background")
    """A rank begins its next data file at this size."""

    # Safety
    durability: Literal["process", "power"] = option("power", "save", "background", "agent", "promote")
    """``"power"`` survives a power cut (everything is synced), ``"process"`` the death of all processes."""
    timeout_s: float = option(1800.0, "save", "background", "agent")
    """Longest wait for other ranks."""
    on_error: Literal["raise", "warn"] = option("raise", "save", "background")
    """``"warn"`` logs errors of storage or ranks instead of raising them from `save`."""
    reuse: bool = option(True, "save", "background", "agent")
    """Take over unchanged files from the last checkpoint in the same folder, as hard links or copies that the
    store makes."""
    promote_to: _Place | tuple[_Place, ...] | list[_Place] | None = option(None, "save", "background")
    """Second path or URL, to which the checkpoint is copied, and committed, once it is committed here; or
    several, each with its own order.  `reknit.options.PromotionTarget` is a place with a limited rate."""

    # Resources
    threads: int | None = option(None, "save", "background", "agent", "promote")
    """Writer threads per rank; None for this rank's share of the cores, at most 4."""
    inflight_nbytes: int = option(64 * MIB, "save", "background", "agent", "promote")
    """Host memory for the writes of a save with ``wait=True``, and for the reads of promotions."""

    # Saves with wait=False only
    stage: Literal["eager", "lazy"] = option("eager", "background")
    """``"lazy"`` copies tensors that only optimizer steps change after `save` returns; these steps wait."""
    when_busy: Literal["wait", "skip"] = option("wait", "background")
    """Whether to wait or to skip the save while two earlier saves still fill the host memory."""
    host_nbytes: int | None = option(None, "background", "start")
    """Host memory that a rank keeps for staging; None for its share of half of the free memory."""
    piece_nbytes: int | None = option(None, "background", "agent")
    """Bytes written at once: 4, 8, 16 or 32 MiB; None to measure the best size."""
    priority: Literal["low", "normal"] = option("low", "background", "start")
    """Whether agents give way to training when both need the processor or the disk."""
    exit_wait_s: float = option(300.0, "background")
    """Longest wait for saves at the end of the interpreter; agents go on afterwards."""

    # Events and progress
    events: Events = option(None, "save", "background", "agent", "promote")
    """Where phases and operations of stores go: a file for lines of JSON, a folder, sinks, functions."""
    progress: bool = option(True, "save")
    """Whether rank 0 shows progress of saves with ``wait=True`` that take longer than two seconds."""

    comm: CommOptions = option(CommOptions(), "save", "background", "start")
    """How ranks reach each other."""

    def __post_init__(self) -> None:
        check_values(self)
        _check_resources(self)
        check_events(self.events)
        require(self.max_file_nbytes >= MIB, "max_file_nbytes must be at least 1 MiB")
        require(len(self.promotions) > 0 or self.promote_to is None, "promote_to has no place in it")
        require(
            self.host_nbytes is None or self.host_nbytes >= 64 * MIB, "host_nbytes must be at least 64 MiB"
        )
        sizes = [nbytes * MIB for nbytes in (4, 8, 16, 32)]
        require(self.piece_nbytes in (None, *sizes), "piece_nbytes is 4, 8, 16 or 32 MiB")
        require(self.exit_wait_s >= 0, "exit_wait_s must not be negative")

    @property
    def promotions(self) -> tuple[PromotionTarget, ...]:
        """All places that `promote_to` names."""
        given = self.promote_to
        if given is None:
            return ()
        several = given if isinstance(given, (tuple, list)) else (given,)
        return tuple(one if isinstance(one, PromotionTarget) else PromotionTarget(one) for one in several)


@checked_call
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How `reknit.load` reads.  Patterns are as in ``fnmatch``, for names ``item/fqn`` of the state."""

    # Content
    only: tuple[str, ...] = option((), "load")
    """Load only entries that these patterns match, and leave the rest of the state as it is."""
    transforms: Sequence[Transform] = option((), "load", "open")
    """Rules of `reknit.transforms` that turn names and layouts of the checkpoint into those of the state."""
    cast: bool = option(False, "load")
    """Convert where the saved dtype differs, as long as nothing but rounding is lost."""
    allow_shape_mismatch: tuple[str, ...] = option((), "load")
    """Patterns of tensors that may have another shape; the common part of both shapes is loaded."""
    allow_pickle: bool = option(False, "load", "open", "verify")
    """Unpickle values saved with pickle.  Only for checkpoints that you trust."""

    # Safety
    verify: Literal["touched", "full", "off"] = option("touched", "load", "open")
    """Which digests are checked: of the blocks that are read, of all files, or none."""
    replicas: tuple[str | os.PathLike[str], ...] = option((), "load", "open")
    """Copies of the checkpoint that replace, in this order, parts that are damaged or cannot be read."""
    timeout_s: float = option(1800.0, "load", "open")
    """Longest wait for other ranks."""

    # Resources
    threads: int | None = option(None, "load", "open", "verify")
    """Reader threads per rank; None for this rank's share of the cores, at most 4."""
    inflight_nbytes: int = option(256 * MIB, "load", "open", "verify")
    """Host memory for reads that cannot go straight into their target."""
    gap_nbytes: int | None = option(None, "load", "open")
    """With ``verify="off"``: read over holes up to this size; None to choose it by the storage."""
    share: Literal["auto", "always", "never"] = option("auto", "load")
    """Whether ranks that want the same bytes read them once, and pass them on; ``"auto"`` if faster."""

    # Events and progress
    events: Events = option(None, "load", "open", "verify")
    """Where phases and operations of stores go: a file for lines of JSON, a folder, sinks, functions."""
    progress: bool = option(True, "load")
    """Whether rank 0 shows progress of loads that take longer than two seconds."""

    comm: CommOptions = option(CommOptions(), "load")
    """How ranks reach each other."""

    def __post_init__(self) -> None:
        check_values(self)
        transforms: Any = self.transforms
        replicas: Any = self.replicas
        for name in ("only", "allow_shape_mismatch"):
            check_patterns(name, getattr(self, name))
        require(
            isinstance(transforms, Sequence) and all(isinstance(one, Transform) for one in transforms),
            f"transforms is a list of rules of reknit.transforms, not {transforms!r}",
        )
        _check_resources(self)
        check_events(self.events)
        require(self.gap_nbytes is None or self.gap_nbytes >= 0, "gap_nbytes must not be negative")
        require(
            self.gap_nbytes is None or self.verify == "off",
            "gap_nbytes means something with verify='off' only: blocks that are checked are read whole",
        )
        require(
            isinstance(replicas, (tuple, list)) and all(map(is_location, replicas)),
            f"replicas is a tuple of paths or URLs, not {replicas!r}",
        )


def check_rate(bytes_per_s: object) -> None:
    """Raise `UsageError` for a value that is not a number of bytes per second."""
    fits = isinstance(bytes_per_s, numbers.Real) and not isinstance(bytes_per_s, bool)
    require(
        bytes_per_s is None or (fits and float(bytes_per_s) > 0),  # type: ignore[arg-type]
        f"bytes_per_s is a number above 0, or None, not {shown(bytes_per_s)}",
    )


def _check_resources(options: Any) -> None:
    """Raise `UsageError` for too few threads, too little memory or no time."""
    threads = options.threads
    require(threads is None or threads >= 1, f"threads must be at least 1, not {threads}")
    require(options.inflight_nbytes >= LEAST_INFLIGHT_NBYTES, "inflight_nbytes must be at least 16 MiB")
    require(options.timeout_s > 0, "timeout_s must be positive")
    require(isinstance(options.comm, CommOptions), f"comm is a reknit.CommOptions, not {shown(options.comm)}")
