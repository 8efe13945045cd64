"""Every knob of reknit, as frozen keyword-only dataclasses."""

from __future__ import annotations

import getpass
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

from reknit.errors import UsageError, shown

MIB = 1 << 20
GIB = 1 << 30

Durability = Literal["process", "power"]

ANYWHERE = ("0.0.0.0", "::")
"""The addresses that stand for all that a host has."""

UNIX = "unix"
"""What stands for a socket in a folder that only this user can enter, in the place of an address."""


@runtime_checkable
class Transform(Protocol):
    """A rule of `reknit.transforms`, where it says what these are."""

    @property
    def optional(self) -> bool:
        """Whether it may match nothing."""

    @property
    def keeps(self) -> bool:
        """Whether what it takes stays."""

    def bind(self, names: Any) -> Any:
        """Tell which names become which."""

    def make(self, shapes: Any, binding: Any) -> Any:
        """Tell what of which becomes what."""

    def inverse(self) -> Any:
        """Return what leads back."""


def local_ranks() -> int:
    """Return how many ranks share this machine, as launchers say it in LOCAL_WORLD_SIZE; 1 if none does."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) else 1


def cores_per_rank() -> int:
    """Return this rank's share of the machine's cores, at least 1."""
    return max(1, (os.cpu_count() or 1) // local_ranks())


def host_name() -> str | None:
    """Return what REKNIT_HOST says: ranks with equal names can share memory.  None to find that out."""
    return os.environ.get("REKNIT_HOST") or None


def store_token() -> str | None:
    """Return what REKNIT_TOKEN says: the secret by which ranks that meet at an address know each other."""
    return os.environ.get("REKNIT_TOKEN") or None


def memory_folder() -> str | None:
    """Return the folder in which ``mem://`` keeps its files, as REKNIT_MEMORY says it; None for the usual."""
    return os.environ.get("REKNIT_MEMORY") or None


def hadoop_conf_dir() -> str | None:
    """Return the folder of Hadoop's configuration: HADOOP_CONF_DIR, or etc/hadoop in HADOOP_HOME."""
    if folder := os.environ.get("HADOOP_CONF_DIR"):
        return folder
    home = os.environ.get("HADOOP_HOME")
    return os.path.join(home, "etc", "hadoop") if home else None


def hadoop_user() -> str:
    """Return as whom Hadoop is asked where it authenticates nobody: HADOOP_USER_NAME, or the user here."""
    if name := os.environ.get("HADOOP_USER_NAME"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # which of the two depends on the version of Python
        raise UsageError(
            f"user {os.geteuid()} has no name on this machine, and Hadoop is to be asked in some name",
            remedy="set HADOOP_USER_NAME",
        ) from error


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
class Tls:
    """The certificates by which ranks know each other: those of others, and their own, as paths of PEM files.

    `ca`: whoever has a certificate that these sign takes part.  `certificate` and `key`: this rank's own, for
    both directions, with the intermediate ones after it; the key without a password.  `server_name`: a name
    that the certificates of all ranks have in common.  Without it a rank's certificate has to name the IP
    address (or the `CommOptions.bind`) under which the others reach it.
    """

    ca: str | os.PathLike[str]
    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("ca", "certificate", "key"):
            path = getattr(self, name)
            _require(
                isinstance(path, (str, os.PathLike)) and path != "", f"tls.{name} is a path, not {path!r}"
            )
            # Agents read the files too, from wherever they run.
            object.__setattr__(self, name, os.path.abspath(path))
        _require(
            self.server_name is None or (isinstance(self.server_name, str) and self.server_name != ""),
            f"tls.server_name is a name, not {self.server_name!r}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """How ranks reach each other.

    `fan_out`: children per node of the tree; that of rank 0 counts.  `connect_timeout_s`: the longest wait
    for a peer to come up.  `max_message_nbytes`: a larger message is refused.

    `bind`: address that this rank's server listens on and that other ranks are told; ``"0.0.0.0"`` or
    ``"::"`` listen on all, and others are told the one that is found.  ``"unix"`` is a socket that only
    processes of this user on this host reach.  `interface`: name of the network interface whose address it
    is, as ``GLOO_SOCKET_IFNAME`` has it.  Without both: ``"unix"`` where all ranks are on one host, of one
    user, and see the same files; else loopback where they are on one host; else the address by which this
    host reaches the master of the framework's store, or that its name leads to, or of its first interface.

    `generation`: a number that is higher in each run of a job than in those before it, the same on all ranks;
    None for the time at which the ranks met (or at which a process that is alone began its save).  `tls`:
    certificates, None for plain connections, which any listener in the network can read.

    Ranks meet once, at the first save or load of a process group; the options of that call count for all
    later ones.
    """

    fan_out: int = 16
    bind: str | None = None
    interface: str | None = None
    connect_timeout_s: float = 120.0
    max_message_nbytes: int = GIB
    generation: int | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _require(self.fan_out >= 1, "fan_out must be at least 1")
        _require(self.connect_timeout_s > 0, "connect_timeout_s must be positive")
        for name in ("bind", "interface"):
            text = getattr(self, name)
            _require(
                text is None or (isinstance(text, str) and text != ""), f"{name} is a text, not {text!r}"
            )
        _require(
            self.interface is None or self.bind is None or self.bind in ANYWHERE,
            f"bind={self.bind!r} and interface={self.interface!r} may differ: give one of them",
        )
        _require(
            self.generation is None or (type(self.generation) is int and 0 <= self.generation < 1 << 63),
            f"generation is a whole number from 0 on, or None, not {self.generation!r}",
        )
        _require(
            self.tls is None or self.bind != UNIX,
            "bind='unix' reaches nobody who would need certificates: leave out bind or tls",
        )
        if isinstance(self.tls, Mapping):  # what became of it in `dataclasses.asdict`, on its way to an agent
            object.__setattr__(self, "tls", Tls(**self.tls))
        _require(
            self.tls is None or isinstance(self.tls, Tls),
            f"tls is a reknit.Tls, not {type(self.tls).__name__}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How `reknit.save` writes.

    `durability`: ``"power"`` survives the loss of all unsynced data (files and directories are fsynced),
    ``"process"`` survives the death of every process but not of the machine.  `threads`: writer threads per
    rank, None for this rank's share of the cores, at most 4, and in the background for the number that a
    quick measurement finds best.  `inflight_nbytes`: bytes of host memory that a synchronous save may use.
    `max_file_nbytes`: a data file rolls over to a next one at this size.
    `check_replicas`: compare the copies of a tensor that several ranks hold.  Where they differ each rank's
    own is stored if they are small, or else the save fails.  ``"sample"`` compares the first 8 KiB of copies
    for which a framework vouches, and every byte of others, ``"all"`` every byte; ``"warn"`` is ``"sample"``
    but stores one rank's copy, with a warning, rather than fail; ``"off"`` compares nothing, and stores one
    rank's copy.  `allow_pickle`: store values that the blob codec does not know with pickle; recorded in the
    manifest.  `timeout_s`: the longest that a rank waits for the others.  `events`: path of a JSON-lines file
    to which this process appends every phase, or None.  `progress`: while a save takes longer than two
    seconds, rank 0 tells how far it is; those in the background never do.  `comm`: how the ranks reach each
    other.

    `on_error`: with ``"warn"`` a save never raises what went wrong with storage or other ranks; it is logged,
    and `PendingSave.result` still raises it.  A wrong call (`UsageError`) is raised all the same.

    `promote_to`: a path or URL, in a slower store that lasts, to which the checkpoint is copied as soon as it
    is committed, every block compared with its digest; it is committed there too, and only when all of it is
    there.  With `wait=False` the agents do that, see `PendingSave.promoted`; otherwise `save` does, and
    returns after it.

    For saves with `wait=False` only: `stage` is ``"eager"`` (the state may be changed once `save` returns) or
    ``"lazy"`` (once `PendingSave.staged` returns; see `reknit.fence`).  `when_busy`: what to do while two
    earlier saves still occupy the host memory: ``"wait"``, or ``"skip"`` this save.  `host_nbytes`: bytes of
    host memory that a rank may keep for staging, None for half of what the host has free, divided by its
    ranks.  `piece_nbytes`: bytes written at once, None for what a quick measurement finds best.  `priority`:
    with ``"low"`` the writing process gives way to training when both want the processor or the disk.
    `exit_wait_s`: the longest that the end of the interpreter waits for saves under way; those staged by then
    are finished by their agents all the same.  What agents and memory are made with (`comm`, `priority`,
    `host_nbytes`) counts from the first such save, or `reknit.prepare`, on.
    """

    durability: Durability = "power"
    threads: int | None = None
    inflight_nbytes: int = 64 * MIB
    max_file_nbytes: int = 16 * GIB
    check_replicas: Literal["sample", "all", "warn", "off"] = "sample"
    allow_pickle: bool = False
    timeout_s: float = 1800.0
    events: str | None = None
    progress: bool = True
    comm: CommOptions = field(default_factory=CommOptions)
    on_error: Literal["raise", "warn"] = "raise"
    promote_to: str | os.PathLike[str] | None = None
    stage: Literal["eager", "lazy"] = "eager"
    when_busy: Literal["wait", "skip"] = "wait"
    host_nbytes: int | None = None
    piece_nbytes: int | None = None
    priority: Literal["low", "normal"] = "low"
    exit_wait_s: float = 300.0

    def __post_init__(self) -> None:
        _check_kinds(self)
        _require(
            self.durability in ("process", "power"),
            f"durability is 'process' or 'power', not {self.durability!r}",
        )
        _require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        _require(self.inflight_nbytes >= 16 * MIB, "inflight_nbytes must be at least 16 MiB")
        _require(self.max_file_nbytes >= MIB, "max_file_nbytes must be at least 1 MiB")
        _require(
            self.check_replicas in ("sample", "all", "warn", "off"),
            f"check_replicas is 'sample', 'all', 'warn' or 'off', not {self.check_replicas!r}",
        )
        _require(self.timeout_s > 0, "timeout_s must be positive")
        _require(self.on_error in ("raise", "warn"), f"on_error is 'raise' or 'warn', not {self.on_error!r}")
        _require(
            self.promote_to is None
            or (isinstance(self.promote_to, (str, os.PathLike)) and self.promote_to != ""),
            f"promote_to is a path or a URL, not {self.promote_to!r}",
        )
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

    `verify`: ``"touched"`` checks the digest of every block that is read, ``"full"`` also checks every block
    of every file before anything changes, the ranks dividing the work, and ``"off"`` checks nothing and reads
    only the bytes wanted.  `cast`: convert where the saved dtype differs from the target's, instead of
    refusing, as far as nothing but rounding is lost (see `reknit.types.dtype.converts`).

    Patterns are those of ``fnmatch``, and names are ``item/fqn`` as the state has them.  `only`: load just
    what these patterns match, and leave everything else of the target as it is.  `lenient`: patterns in which
    missing, unexpected or mismatched entries are reported instead of refused; `strict=False` is the pattern
    ``*``.  `allow_shape_mismatch`: patterns of tensors whose saved shape may differ, in as many dimensions;
    what both shapes have is loaded, and the rest of the target keeps its values.  The states that an
    optimizer has for such a parameter may differ likewise.

    `rename`: from names in the checkpoint to names in the state; one that ends in ``/`` or ``.`` is a prefix,
    and renames all below.  `rewrite`: pairs of a regular expression and its replacement, as for ``re.sub``,
    that change the checkpoint's names in this order, after `rename`.  `transforms`: rules that change names
    and layouts after both (see `reknit.transforms`); other options go by the names that these make.

    `threads`: reader threads per rank, None for this rank's share of the cores, at most 4.
    `inflight_nbytes`: bytes of host memory for reads that cannot go straight into their target.
    `gap_nbytes`: with `verify="off"`, holes up to this size between wanted runs are read over, as long as
    little is wasted so; None for what suits the storage.
    `allow_pickle`: unpickle values that were saved with `allow_pickle`.  Only for checkpoints that you trust.
    `timeout_s`: the longest that a rank waits for the others.  `events`: path of a JSON-lines file to which
    this process appends every phase, or None.  `progress`: while a load takes longer than two seconds, rank 0
    tells how far it is.  `comm`: how the ranks reach each other.

    `on_corrupt`: ``"raise"``, or ``"replica"`` to take what is damaged or cannot be read (a block of tensors,
    or the whole of the manifest, the index or a file of values) from one of `replicas`, in this order: paths
    or URLs of other copies of the same checkpoint.  What ``verify="full"`` checks has to be sound.

    `share`: whether ranks that want the same bytes divide the reading, and pass on to each other what they
    read: in shared memory on one host (one copy of the bytes there), and through torch's process group
    between hosts.  ``"always"`` takes each byte from storage once; ``"auto"`` where that is sooner, going by
    how many ranks want it and how fast storage was found to be; ``"never"``.
    """

    verify: Literal["touched", "full", "off"] = "touched"
    cast: bool = False
    only: tuple[str, ...] = ()
    lenient: tuple[str, ...] = ()
    allow_shape_mismatch: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    rewrite: tuple[tuple[str, str], ...] = ()
    transforms: Sequence[Transform] = ()
    threads: int | None = None
    inflight_nbytes: int = 256 * MIB
    gap_nbytes: int | None = None
    allow_pickle: bool = False
    timeout_s: float = 1800.0
    events: str | None = None
    progress: bool = True
    comm: CommOptions = field(default_factory=CommOptions)
    share: Literal["auto", "always", "never"] = "auto"
    on_corrupt: Literal["raise", "replica"] = "raise"
    replicas: tuple[str | os.PathLike[str], ...] = ()

    def __post_init__(self) -> None:
        _check_kinds(self)
        _require(
            self.share in ("auto", "always", "never"),
            f"share is 'auto', 'always' or 'never', not {self.share!r}",
        )
        _require(
            self.verify in ("touched", "full", "off"),
            f"verify is 'touched', 'full' or 'off', not {self.verify!r}",
        )
        for name in ("only", "lenient", "allow_shape_mismatch"):
            _check_patterns(name, getattr(self, name))
        _check_rename(self.rename)
        _check_transforms(self.transforms)
        _check_rewrite(self.rewrite)
        _require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        _require(self.inflight_nbytes >= 16 * MIB, "inflight_nbytes must be at least 16 MiB")
        _require(self.gap_nbytes is None or self.gap_nbytes >= 0, "gap_nbytes must not be negative")
        _require(self.timeout_s > 0, "timeout_s must be positive")
        _check_replicas(self.on_corrupt, self.replicas)


_KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "int | None": ((numbers.Integral, type(None)), "a whole number, or None"),
    "float": (numbers.Real, "a number"),
    "str | None": ((str, os.PathLike, type(None)), "a text, or None"),
    "CommOptions": (CommOptions, "a reknit.CommOptions"),
}
"""What a knob of a type may be, and how that is called."""


def _check_kinds(options: Any) -> None:
    """Raise `UsageError` for a knob of another type than it should have: a text "no" would count as true."""
    for knob in fields(options):
        kinds, called = _KINDS.get(str(knob.type), (object, ""))
        value = getattr(options, knob.name)
        fits = isinstance(value, kinds) and (kinds in (bool, object) or not isinstance(value, bool))
        _require(fits, f"{knob.name} is {called}, not {shown(value)}")


def _check_replicas(on_corrupt: str, replicas: object) -> None:
    """Raise `UsageError` unless replicas are several places, and there are some where they are wanted."""
    _require(on_corrupt in ("raise", "replica"), f"on_corrupt is 'raise' or 'replica', not {on_corrupt!r}")
    _require(
        isinstance(replicas, (tuple, list)) and all(isinstance(r, (str, os.PathLike)) for r in replicas),
        f"replicas is a tuple of paths or URLs, not {replicas!r}",
    )
    _require(on_corrupt == "raise" or bool(replicas), "on_corrupt='replica' needs a path in `replicas`")


def _check_patterns(name: str, patterns: object) -> None:
    """Raise `UsageError` unless `patterns` are several texts."""
    _require(not isinstance(patterns, str), f"{name} is a tuple of patterns, not one string")
    _require(
        isinstance(patterns, (tuple, list)) and all(isinstance(p, str) and p for p in patterns),
        f"{name} is a tuple of patterns, which are texts that are not empty, not {patterns!r}",
    )


def _check_transforms(transforms: object) -> None:
    _require(
        isinstance(transforms, Sequence) and all(isinstance(one, Transform) for one in transforms),
        f"transforms is a list of rules of reknit.transforms, not {transforms!r}",
    )


def _check_rename(rename: object) -> None:
    """Raise `UsageError` unless names go to names, and prefixes to prefixes."""
    _require(isinstance(rename, Mapping), f"rename maps names to names, and is no {type(rename).__name__}")
    assert isinstance(rename, Mapping)
    for old, new in rename.items():
        _require(
            isinstance(old, str) and isinstance(new, str) and old != "",
            f"rename maps names to names, which {old!r}: {new!r} does not",
        )
        below = old.endswith(("/", "."))
        _require(
            not below or new == "" or new.endswith(("/", ".")),
            f"rename takes all below the prefix {old!r} to {new!r}, which is no prefix: end it in / or .",
        )
        _require(below or new != "", f"rename leaves {old!r} without a name")


def _check_rewrite(rewrite: object) -> None:
    """Raise `UsageError` for what is no list of expressions and replacements."""
    _require(
        isinstance(rewrite, (tuple, list))
        and all(
            isinstance(rule, (tuple, list)) and len(rule) == 2 and all(isinstance(part, str) for part in rule)
            for rule in rewrite
        ),
        f"rewrite is a tuple of pairs (expression, replacement), not {rewrite!r}",
    )
    assert isinstance(rewrite, (tuple, list))
    for expression, replacement in rewrite:
        try:
            re.sub(expression, replacement, "")
        except (re.error, IndexError) as error:
            raise UsageError(
                f"rewrite has the rule {expression!r}, {replacement!r}, which is no regular expression with "
                f"its replacement: {error}",
                remedy="write both as for re.sub, as raw strings",
            ) from error


def completing() -> bool:
    """Tell whether a shell only asks how a command line could go on, as the package argcomplete has it."""
    return "_ARGCOMPLETE" in os.environ


def quiet_grpc() -> None:
    """Keep gRPC, before its first import, from telling users that a peer ended."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


_OF_STORES = ("AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "KRB5", "REKNIT_MEMORY")


def store_variables() -> dict[str, str]:
    """Return the variables by which the clients of stores find what they need, secrets among them."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_STORES)}


def take_store_variables(variables: Mapping[str, str]) -> None:
    """Have the variables of stores as another process has them."""
    for name in store_variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def agent_environment(search_path: Sequence[str]) -> dict[str, str]:
    """Return the environment of an agent process that finds modules where this process does."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(folder or os.getcwd() for folder in search_path)
    environment["PYTHONSAFEPATH"] = "1"  # no module of the working folder takes the place of another
    # Importing NumPy would else start a thread per core, for algebra that an agent never does.
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    return environment
