#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict() changes an optimizer that has not stepped yet, and with it the training.
#
# The function has to return states, and a fresh optimizer has none.  So it gives every parameter a gradient of zeros,
# sets lr to 0, calls step(), and puts lr back.  No weight moves, but the states stay.  AdamW, Adam, NAdam, Adamax and
# RAdam go on with step 2 and its bias correction.  SGD with dampening damps its first gradient.  Rprop begins with its
# smallest step size in the place of lr.  The first step of ASGD moves nothing, since it keeps the lr of 0 as its own
# step size.  So a job that saves before its first step trains differently from a job that does not.  Without weight
# decay, Adadelta, Adagrad, RMSprop and SGD without dampening are not affected.
#
# Expected: a call that reads leaves the training as it is.  Exits 0 as long as torch behaves so, and 1 if that has
# changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0" numpy

cat >"$folder/look.py" <<'PYTHON'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = (
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Rprop, {"lr": 0.01}),
    (torch.optim.ASGD, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01}),
)


def moved(kind, options, look):
    """Return how far one weight moves in the first step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = kind(model.parameters(), **options)
    if look:
        get_optimizer_state_dict(model, optimizer)
        assert model.weight.item() == 1 and optimizer.param_groups[0]["lr"] == options["lr"]
    model.weight.grad = torch.full((1, 1), 2.0)
    optimizer.step()
    return 1 - model.weight.item()


for kind, options in OPTIMIZERS:
    without, after = (moved(kind, options, look) for look in (False, True))
    print(f"{kind.__name__}: the first step moves {without:.6f}, after a look {after:.6f}")
PYTHON

timeout 120 "$folder/venv/bin/python" "$folder/look.py" >"$folder/out" 2>"$folder/log" || {
    cat "$folder/log" >&2
    exit 1
}
cat "$folder/out"

diff "$folder/out" - <<'SEEN'
AdamW: the first step moves 0.010100, after a look 0.007541
SGD: the first step moves 0.020000, after a look 0.010000
Rprop: the first step moves 0.010000, after a look 0.000001
ASGD: the first step moves 0.020001, after a look 0.000000
RMSprop: the first step moves 0.100000, after a look 0.100000
SEEN
