#!/usr/bin/env bash
# numpy 2.4.6: a Generator whose bit_generator.state was restored draws the same numbers, and spawns other generators.
#
# bit_generator.state is the place in the stream.  spawn(), for data-loader workers or ranks, does not use it: it takes
# children of the SeedSequence with which the generator was made, and counts them.  Neither is in the state.  A
# generator of the same seed begins again with the first child, so workers draw the numbers that the workers before the
# stop drew; one of another seed spawns children of that seed.  Its own numbers are right in both cases, so a test of
# these passes.  pickle keeps everything.
#
# Expected: the same numbers and the same children after a restore as after the save.  Exits 0 as long as numpy behaves
# so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "numpy==2.4.6"

cat >"$folder/spawn.py" <<'PYTHON'
import pickle

import numpy as np


def drawn(generator):
    """Return a number of a generator, and one of the next generator that it spawns."""
    (child,) = generator.spawn(1)
    return int(generator.integers(1000)), int(child.integers(1000))


generator = np.random.default_rng(7)
(earlier,) = generator.spawn(1)
print("the child before the save:", int(earlier.integers(1000)))
state, pickled = generator.bit_generator.state, pickle.dumps(generator)
print("next number, next child:", *drawn(generator))
for seed in (7, 8):
    restored = np.random.default_rng(seed)
    restored.bit_generator.state = state
    print(f"restored, made with seed {seed}:", *drawn(restored))
print("restored by pickle:", *drawn(pickle.loads(pickled)))
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/spawn.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
the child before the save: 305
next number, next child: 944 681
restored, made with seed 7: 944 305
restored, made with seed 8: 944 869
restored by pickle: 944 681
SEEN
