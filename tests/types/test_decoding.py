from __future__ import annotations

import subprocess
import sys

ROUNDS = 300
SCRIPT = """
import sys, threading
import msgspec
from reknit.types.small import converted, decoder

sys.setswitchinterval(1e-6)

def types():
    module = {"__name__": "types_of_a_round"}
    exec('''
import msgspec
class Part(msgspec.Struct):
    numbers: "list[tuple[str, int, dict[str, list[int]]]]" = []
    sizes: "dict[str, tuple[int, ...]] | None" = None
class Whole(msgspec.Struct):
    parts: "list[Part]" = []
    last: "Part | None" = None
''', module)
    sys.modules["types_of_a_round"] = type(sys)("types_of_a_round")
    vars(sys.modules["types_of_a_round"]).update(module)
    return module["Part"], module["Whole"]

def use(barrier, deed, kind):
    barrier.wait()
    deed(kind)

deeds = [
    lambda kind: decoder(kind)(msgspec.msgpack.encode(kind())),
    lambda kind: decoder(kind, json=True)(b"{}"),
    lambda kind: converted({}, kind),
]
for _ in range(int(sys.argv[1])):
    barrier = threading.Barrier(2 * len(deeds))
    threads = [threading.Thread(target=use, args=(barrier, deed, kind)) for kind in types() for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""


def test_threads_that_decode_types_for_the_first_time_at_once_do_not_end_the_process() -> None:
    command = [sys.executable, "-c", SCRIPT, str(ROUNDS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
