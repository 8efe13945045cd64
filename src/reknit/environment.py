"""The environment variables of this process, and those of the processes that it starts."""

from __future__ import annotations

import getpass
import json
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FOR_GRPC = {"GRPC_VERBOSITY": "ERROR", "GRPC_ENABLE_FORK_SUPPORT": "0"}
"""The variables that gRPC reads when it is imported, and only then.

Without the second one, gRPC starts its threads again in a forked process, such as a worker of a data loader.
They use memory of the parent's server, so that some of these processes end with a segmentation fault.
"""

_LAUNCHED = {
    "WORLD_SIZE": "torchrun or a launcher like it",
    "JAX_NUM_PROCESSES": "a launcher of JAX",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
    "PMI_SIZE": "MPI",
    "SLURM_STEP_NUM_TASKS": "Slurm",
    "SLURM_NTASKS": "Slurm",
}
"""The variables in which launchers say how many processes they start.  The first that is set decides: a
launcher may itself be started by one further down, such as torchrun by Slurm."""

_OF_BUCKETS = ("ENDPOINT", "URL", "ACCOUNT", "EMULATOR", "REGION")
"""Parts of the names of the variables that say where buckets are."""

_SHELLS = {"interactive", "bash", "sh", "zsh"}

_OF_AGENTS = {
    b"PYTHONPATH",
    b"PYTHONSAFEPATH",
    b"OPENBLAS_NUM_THREADS",
    b"OMP_NUM_THREADS",
    b"GRPC_VERBOSITY",
    b"GRPC_ENABLE_FORK_SUPPORT",
    b"ARROW_DEFAULT_MEMORY_POOL",
}
"""The variables that agents set themselves."""


def local_ranks() -> int:
    """Return the number of ranks on this machine, from LOCAL_WORLD_SIZE of launchers; 1 if it is not set."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) else 1


def cores_per_rank() -> int:
    """Return this rank's share of the machine's cores, at least 1."""
    return max(1, (os.cpu_count() or 1) // local_ranks())


class Launch(NamedTuple):
    """A launcher that started this process, with others: `variable` says that they are `size`.

    `rank` is the number of this process, None if it is not known.
    """

    launcher: str
    variable: str
    size: int
    rank: int | None = None


def launch() -> Launch | None:
    """Return the launch of this process with others, or None if it was started alone or without variables.

    In a shell inside an allocation of Slurm, SLURM_NTASKS is the number of processes that could be started.
    """
    variable = next((name for name in _LAUNCHED if os.environ.get(name, "").isdecimal()), None)
    if variable is None:
        return None
    in_shell = "SLURM_PROCID" not in os.environ and os.environ.get("SLURM_JOB_NAME") in _SHELLS
    size = int(os.environ[variable])
    if size < 2 or (variable == "SLURM_NTASKS" and in_shell):
        return None
    rank = os.environ.get("RANK", "") if variable == "WORLD_SIZE" else ""
    known = rank.isdecimal() and int(rank) < size
    return Launch(_LAUNCHED[variable], variable, size, int(rank) if known else None)


def host_name() -> str | None:
    """Return REKNIT_HOST, by which ranks with equal names can share memory, or None to detect that."""
    return os.environ.get("REKNIT_HOST") or None


def store_token() -> str | None:
    """Return REKNIT_TOKEN, the secret by which ranks that meet at an address identify each other."""
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


def bucket_variables(prefix: str) -> frozenset[tuple[str, str]]:
    """Return the variables with a prefix, such as ``"AWS_"``, that say where buckets are.

    Other variables, such as tokens, may be renewed at any time.
    """
    return frozenset(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(prefix) and any(part in name for part in _OF_BUCKETS)
    )


def hadoop_user() -> str:
    """Return the user for Hadoop without authentication: HADOOP_USER_NAME, or the user of this process."""
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
    """Return the number of threads of a rank: `wanted`, or its share of the cores, from 1 to 4.

    More threads than cores make a disk slower.
    """
    if wanted is not None:
        return wanted
    return min(4, cores_per_rank())


def completing() -> bool:
    """Return whether a shell only requests completions of a command line, by the package argcomplete."""
    return "_ARGCOMPLETE" in os.environ


def set_grpc_variables() -> list[str]:
    """Set the variables that gRPC reads at its import, unless the user has set them; return the new names.

    gRPC then does not report that a peer ended, and does nothing in forked processes.
    """
    missing = [name for name in _FOR_GRPC if name not in os.environ]
    os.environ.update({name: _FOR_GRPC[name] for name in missing})
    return missing


def remove_grpc_variables(names: list[str]) -> None:
    """Remove variables again, for the processes that this one starts."""
    for name in names:
        if os.environ.get(name) == _FOR_GRPC[name]:
            del os.environ[name]


def grpc_handles_forks() -> bool:
    """Return whether gRPC acts in forked processes: the user wants it, or has imported gRPC already."""
    wanted = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "" if "grpc" in sys.modules else "0")
    return wanted.lower() not in {"0", "false", "no", "n", "f"}


@contextmanager
def programs_beside_python() -> Iterator[None]:
    """Add the folder of Python to the search path of programs within the block."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([before, os.path.dirname(sys.executable)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def all_variables() -> dict[bytes, bytes]:
    """Return the variables of this process, including secrets, without those of `_OF_AGENTS`."""
    # Not `items`: another thread may remove a variable at the same time.
    found = ((name, os.environb.get(name)) for name in list(os.environb))
    return {name: value for name, value in found if value is not None and name not in _OF_AGENTS}


def take_variables(variables: Mapping[bytes, bytes]) -> None:
    """Set the variables of another process in this one, which is an agent."""
    mine = all_variables()
    for name in mine.keys() - variables.keys():
        os.environb.pop(name, None)
    os.environb.update(dict(variables.items() - mine.items()))


def fsspec_config() -> str | None:
    """Return the settings of fsspec as JSON, empty without any; None if other processes cannot have them."""
    config = sys.modules.get("fsspec.config")
    if config is None or not config.conf:
        return ""
    try:
        text = json.dumps(config.conf)
        return text if json.loads(text) == config.conf else None
    except (TypeError, ValueError, RecursionError):
        return None


def agent_environment(search_path: Iterable[object]) -> dict[str, str]:
    """Return the environment of an agent process that finds modules where this process does."""
    environment = dict(os.environ)
    here = ""
    with suppress(FileNotFoundError):  # a working folder that was removed has no modules
        here = os.getcwd()
    folders = [folder or here for folder in search_path if isinstance(folder, str)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    environment["PYTHONSAFEPATH"] = "1"  # no module of the working folder takes the place of another
    # Importing NumPy would else start a thread per core, for algebra that an agent never does.
    environment["OPENBLAS_NUM_THREADS"] = environment["OMP_NUM_THREADS"] = "1"
    # Arrow's own allocators keep 4 MiB and a thread, for tables that an agent makes once in a save.
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    return environment
