"""One process of a JAX job: calls the function of each line of JSON on stdin, until stdin ends.

Started by `tests.jax.job`, with the number of the process, of all processes, and the port of the service.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any

LONGEST_S = 300
"""The longest time of a call; then the process ends."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints, too, and not through Python
    faulthandler.register(signal.SIGUSR1)
    rank, size, port = map(int, sys.argv[1:])
    import jax

    if size > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)  # in case no parent is left to end it
        print(json.dumps(answer(*json.loads(line))), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()
    # Not jax.distributed.shutdown(): the others may have ended, and all results have been sent.


def answer(name: str, arguments: list[Any]) -> dict[str, Any]:
    """Call a function by its dotted name; warnings are errors, as they are in pytest."""
    try:
        module, _, function = name.rpartition(".")
        called = getattr(import_module(module), function)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return {"value": called(*arguments)}
    except BaseException:  # the test receives any error
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    main()
