"""What the environment of this process says, and what it gives to the processes that it starts."""

from __future__ import annotations

import getpass
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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

_SHELLS = {"interactive", "bash", "sh", "zsh"}

_OF_STORES = ("AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "KRB5", "REKNIT_MEMORY")


def local_ranks() -> int:
    """Return how many ranks share this machine, as launchers say it in LOCAL_WORLD_SIZE; 1 if none does."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdecimal() and int(local) else 1


def cores_per_rank() -> int:
    """Return this rank's share of the machine's cores, at least 1."""
    return max(1, (os.cpu_count() or 1) // local_ranks())


class Launch(NamedTuple):
    """A launcher that started this process, with others: `variable` says that they are `size`."""

    launcher: str
    variable: str
    size: int


def launch() -> Launch | None:
    """Return how this process was started with others, None if it was started alone or that is not known.

    In a shell inside an allocation of Slurm, SLURM_NTASKS is what could be started, not what was.
    """
    variable = next((name for name in _LAUNCHED if os.environ.get(name, "").isdecimal()), None)
    if variable is None:
        return None
    in_shell = "SLURM_PROCID" not in os.environ and os.environ.get("SLURM_JOB_NAME") in _SHELLS
    size = int(os.environ[variable])
    if size < 2 or (variable == "SLURM_NTASKS" and in_shell):
        return None
    return Launch(_LAUNCHED[variable], variable, size)


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


def completing() -> bool:
    """Tell whether a shell only asks how a command line could go on, as the package argcomplete has it."""
    return "_ARGCOMPLETE" in os.environ


def quiet_grpc() -> None:
    """Keep gRPC, before its first import, from telling users that a peer ended."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@contextmanager
def programs_beside_python() -> Iterator[None]:
    """Find the programs that lie beside Python too, within the block: those of its environment."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([before, os.path.dirname(sys.executable)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


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
