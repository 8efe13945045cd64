#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: {"a.b": x, "a": {"b": y}} is saved without an error, and comes back with one value twice.
#
# The names of arrays in a folder are the keys of the tree with dots between them, and a dot within a key is not
# escaped.  So both leaves are one array in the folder, which is written twice, and either value may stay.  The folder's
# description has both leaves, so a restore finds nothing missing, with a target and without one.  Keys with dots are
# usual where names come from torch.  Slashes do not do this.
#
# Expected: both values, or an error.  Exits 0 as long as Orbax behaves so, and 1 if that has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "orbax-checkpoint==0.12.8" "jax==0.10.2"

cat >"$folder/dots.py" <<'PYTHON'
import tempfile

import jax.numpy as jnp
import orbax.checkpoint as ocp


def restored(tree):
    """Save a tree, restore it, and return the first numbers of both leaves."""
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/tree", tree)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(f"{folder}/tree", tree)
    return [float(leaf[0]) for leaf in found.values() if not isinstance(leaf, dict)] + [float(found["a"]["b"][0])]


x, y = jnp.full(2, 1.0), jnp.full(2, 2.0)
print("with a slash, both come back:", restored({"a/b": x, "a": {"b": y}}) == [1.0, 2.0])
one, other = restored({"a.b": x, "a": {"b": y}})
print("with a dot, both come back:", (one, other) == (1.0, 2.0))
print("with a dot, one value comes back twice:", one == other and one in (1.0, 2.0))
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/dots.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
with a slash, both come back: True
with a dot, both come back: False
with a dot, one value comes back twice: True
SEEN
