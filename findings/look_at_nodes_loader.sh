#!/usr/bin/env bash
# torchdata 0.11.0: a nodes.Loader whose state was read before load_state_dict begins at its first value after it.
#
# A checkpointing program may read the state of a new loader before it loads, for example to compare the keys with the
# saved ones.  state_dict() of a loader that has no iterator makes one, which the next loop is to continue.
# load_state_dict() sets the state that a new iterator takes, and leaves the one that waits.  So the next loop takes the
# wrong one, gives the values that training has had, and state_dict() then describes that place.  The loop after it
# begins at the loaded state.  StatefulDataLoader of the same package does not do so.
#
# Expected: the loop after load_state_dict begins at the loaded state.  Exits 0 as long as torchdata behaves so, and 1
# if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torchdata==0.11.0" "torch==2.13.0" numpy

cat >"$folder/look.py" <<'PYTHON'
from itertools import islice

from torchdata.nodes import IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader


def nodes():
    """Return a loader of nodes over six numbers."""
    return Loader(IterableWrapper(range(6)))


def stateful():
    """Return the other loader of the package over the same."""
    return StatefulDataLoader(range(6), batch_size=None)


def resumed(make, look):
    """Take four values, load the state into another loader, and return the values of its first two loops."""
    stopped = iter(loader := make())
    assert list(islice(stopped, 4)) == [0, 1, 2, 3]
    other = make()
    if look:
        other.state_dict()
    other.load_state_dict(loader.state_dict())
    return list(other), list(other)


for make in (nodes, stateful):
    for look in (False, True):
        print(make.__name__, "looked at," if look else "untouched,", *resumed(make, look))
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/look.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
nodes untouched, [4, 5] [0, 1, 2, 3, 4, 5]
nodes looked at, [0, 1, 2, 3, 4, 5] [4, 5]
stateful untouched, [4, 5] [0, 1, 2, 3, 4, 5]
stateful looked at, [4, 5] [0, 1, 2, 3, 4, 5]
SEEN
