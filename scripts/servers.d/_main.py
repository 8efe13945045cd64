"""Bring servers up and down, and tell which run.  A server is a file beside this one.

It has these names:

``ABOUT``
    what it is, in a few words;
``AFTER``
    names of servers that it needs, as a tuple;
``TIMEOUT_S``
    the longest that it may take from its start until it is ready;
``install(home)``
    make sure that all it needs is there; `home` is its folder, which stays, and in which it keeps everything;
``start(home, running)``
    start processes with `_process.spawn`, and return a dict: ``"pids"`` is a list of what `spawn` returned,
    ``"leaves"``, if there, files outside of `home` to be removed when they have ended, ``"log"`` where to
    look when they do not come up, and the rest what a client has to know, such as the ``"endpoint"``.
    `running` has such dicts of the servers in `AFTER`;
``ready(server)``
    return when the server with this dict works, and raise otherwise; called until it returns.

The dict is kept in ``.servers/NAME.json`` as long as the server runs.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATE = HERE.parent.parent / ".servers"
sys.path.insert(0, str(HERE))

import _process  # noqa: E402  (found by the line above)


def main() -> int:
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(prog="scripts/servers", description="Real servers for tests.")
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"there is no server {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    chosen = arguments.names or names
    if arguments.action == "status":
        return status(chosen)
    STATE.mkdir(exist_ok=True)
    return up(chosen) if arguments.action == "up" else down(chosen, names)


def up(names: list[str]) -> int:
    """Start what does not run, after what it needs; go on with the others when one fails."""
    failed = []
    for name in in_order(names):
        try:
            with locked(name):
                told = bring_up(name)
            print(f"{name:12s} {told}")
        except (OSError, RuntimeError) as error:
            failed.append(name)
            print(f"{name:12s} FAILED: {error}", file=sys.stderr)
    return 1 if failed else 0


def bring_up(name: str) -> str:
    module, home = load(name), STATE / name
    running = {needed: state(needed) for needed in module.AFTER}
    if missing := [needed for needed, server in running.items() if server is None]:
        raise RuntimeError(f"it needs {', '.join(missing)}, which is not up")
    server = state(name)
    if server is not None and stamp(running) == server.get("after") and answers(module, server):
        return f"is up already: {endpoint(server)}"
    if server is not None:
        _process.stop(server)
    home.mkdir(exist_ok=True)
    module.install(home)
    server = module.start(home, running) | {"after": stamp(running)}
    try:
        wait(module, server)
    except BaseException:
        _process.stop(server)
        raise
    temporary = STATE / f"{name}.json.new"
    temporary.write_text(json.dumps(server, indent=1))
    temporary.replace(STATE / f"{name}.json")
    return f"is up: {endpoint(server)}"


def down(names: list[str], known: list[str]) -> int:
    """Stop servers, and before them those that need them."""
    chosen = set(names)
    for name in reversed(in_order(known)):
        if name in chosen or chosen & set(load(name).AFTER):
            with locked(name):
                server = state(name)
                (STATE / f"{name}.json").unlink(missing_ok=True)
                if server is not None:
                    _process.stop(server)
            print(f"{name:12s} {'was not up' if server is None else 'is down'}")
    return 0


def status(names: list[str]) -> int:
    """Tell of each server whether it works; fail when one does not."""
    bad = 0
    for name in names:
        module, server = load(name), state(name)
        if server is None:
            told = f"not up            {module.ABOUT}"
        elif answers(module, server):
            told = f"up                {endpoint(server)}"
        else:
            told = f"does not answer   {endpoint(server)}; scripts/servers up {name}"
        bad += not told.startswith("up")
        print(f"{name:12s} {told}")
    return 1 if bad else 0


def in_order(names: list[str]) -> list[str]:
    """Return the names and those that they need, each after what it needs."""
    order: list[str] = []
    for name in names:
        order += [other for other in (*in_order(list(load(name).AFTER)), name) if other not in order]
    return order


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"servers_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state(name: str) -> dict | None:
    """Return what is known of a server whose processes run."""
    try:
        server = json.loads((STATE / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return server if any(_process.runs(pid) for pid in server["pids"]) else None


def stamp(running: dict[str, dict]) -> list:
    """Return what changes when a server that another needs is started anew."""
    return [server["pids"] for server in running.values()]


def endpoint(server: dict) -> str:
    return str(server.get("endpoint", server["pids"]))


def answers(module, server: dict) -> bool:
    try:
        module.ready(server)
    except (OSError, RuntimeError):
        return False
    return all(_process.runs(pid) for pid in server["pids"])


def wait(module, server: dict) -> None:
    """Return when a server is ready; raise when it ends before, or takes too long."""
    end = time.monotonic() + module.TIMEOUT_S
    while True:
        try:
            return module.ready(server)
        except (OSError, RuntimeError) as error:
            log = f"see {server['log']}" if "log" in server else "it keeps no log"
            if not all(_process.runs(pid) for pid in server["pids"]):
                raise RuntimeError(f"a process of it ended; {log}") from error
            if time.monotonic() > end:
                late = f"it is not ready after {module.TIMEOUT_S} s ({error}); {log}"
                raise RuntimeError(late) from error
        time.sleep(0.1)


@contextmanager
def locked(name: str):
    """Let no other call of this script change the same server meanwhile."""
    with open(STATE / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    os.chdir(HERE.parent.parent)
    sys.exit(main())
