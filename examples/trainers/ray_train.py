"""Train with Ray Train, and resume from the newest step on any number of workers.

python examples/trainers/ray_train.py FOLDER --workers 2

Run it again with more steps, or with another number of workers.  ``--die-at 9.05`` kills a worker 0.05 s
after step 9 of a new run; Ray then starts all workers again.  The weights in the end are those of a run in
which nothing died.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn
from torch.distributed.fsdp import fully_shard

import reknit
from reknit.integrations.ray import report, saved_path
from reknit.policies import every, latest


def new_model() -> nn.Module:
    """Return the model, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.1), nn.Linear(33, 1))


def train(config: dict[str, Any]) -> None:
    """Train on one worker, which holds a part of the model."""
    model = fully_shard(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with reknit.Checkpointer(config["steps_folder"], save=every(steps=2), keep=latest(2)) as run:
        first = run.resume(state)
        for step in range(first, config["steps"]):
            torch.manual_seed(step)  # the same data and dropout on any number of workers
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = step == config["steps"] - 1
            report({"loss": loss.item(), "first": first}, run, step, state, force=last)
            if first == 0 and step == int(config["die_at"]):
                die_soon(config["die_at"] % 1)


def die_soon(seconds: float) -> None:
    """Kill the last worker after some seconds, while it goes on."""
    context = ray.train.get_context()
    if context.get_world_rank() == context.get_world_size() - 1:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def main() -> None:
    """Read the arguments, train on a cluster, and load the last step into this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder that all hosts of the cluster see")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--restarts", type=int, default=1, help="how often Ray starts the workers again")
    parser.add_argument("--die-at", type=float, default=-1.0, help="step, and seconds after the point")
    args = parser.parse_args()
    folder = args.folder.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "steps_folder": f"{folder}/steps", "die_at": args.die_at},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=args.restarts),
        ),
    )
    result = trainer.fit()
    # The step that Ray has registered may be older, and removed by now, if all workers died at the end.
    path = reknit.latest(folder / "steps")
    if path is None:
        raise SystemExit("no step is committed")
    model = new_model()
    reknit.load(path, {"model": model})
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(
        f"{Path(path).name}: began with step {result.metrics['first']}, "
        f"weights {hashlib.sha256(weights).hexdigest()[:16]}, "
        f"registered by Ray: {Path(saved_path(result.checkpoint)).name}",
        flush=True,
    )


if __name__ == "__main__":
    main()
