"""Train a small language model on any number of ranks, with checkpoints: the script to read first.

Every rank runs this file, started by torchrun or by run.py.  All there is to do about checkpoints stands
in `main`: one dict names the state, one call resumes, one call saves when it is time, and does not wait until
that is written.  None of the three says how many ranks there are or how they share the model, so the script
resumes on any layout that it can train on.

    torchrun --nproc-per-node 4 examples/demo/train.py --root runs/a
    torchrun --nproc-per-node 2 examples/demo/train.py --root runs/a --tp 2 --steps 48
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fingerprint import fingerprint
from source_text import Batches, read_text
from tiny_llama import Config, TinyLlama, loss_of, shard
from torch.distributed.device_mesh import init_device_mesh

import reknit
from reknit.policies import every, latest


def main() -> None:
    """Train from the newest step, or from scratch where there is none."""
    args = arguments()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    replica, num_replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()

    torch.manual_seed(args.seed)  # the same weights everywhere, before they are spread out
    model = shard(TinyLlama(Config(), args.dropout), mesh)
    # Not foreach: with tensor parallelism, parameters lie on different meshes.
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    batches = Batches(
        read_text().training,
        num_rows=args.rows,
        length=args.length + 1,
        seed=args.seed,
        part=replica,
        num_parts=num_replicas,
    )
    torch.manual_seed(args.seed + 1 + replica)  # from here on, every replica draws its own dropout

    # -- everything that makes the run what it is; reknit takes the objects themselves
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": batches,
        "rng": reknit.RngState(mesh=mesh["dp"]),
    }
    # -- when to save, and what to keep; at the end of the block all saves are committed, or it raises why not
    with reknit.Checkpointer(args.root, save=every(args.save_every), keep=latest(3)) as run:
        # -- resume from the newest step of this run, if there is one, or begin with what another run saved
        if args.start_from:
            report = reknit.load(args.start_from, state)
            first = (report.step or 0) + 1
            log(args.journal, notes=dict(report.notes), resharded=len(report.resharded))
        else:
            first = run.resume(state) or 1
        log(args.journal, first=first)
        for step in range(first, args.steps + 1):
            model.train(step <= args.dropout_steps)  # the last steps are taken without dropout
            loss = train_step(model, optimizer, scheduler, next(batches), mesh)
            log(args.journal, step=step, loss=loss)
            # -- save: copied when this returns, written and committed while training goes on
            run.save(step, state, {"loss": loss})

    log(args.journal, fingerprint=fingerprint(model, optimizer, scheduler, batches))
    dist.destroy_process_group()


def train_step(model: Any, optimizer: Any, scheduler: Any, rows: torch.Tensor, mesh: Any) -> float:
    """Take one step, and return the loss over the global batch."""
    optimizer.zero_grad()
    loss: Any = loss_of(model, rows)
    loss.backward()
    optimizer.step()
    scheduler.step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return float(total / mesh["dp"].size())


def log(path: Path | None, **record: Any) -> None:
    """Append what happened to the log, or print it; the first rank alone does."""
    if dist.get_rank() != 0:
        return
    line = json.dumps(record)
    if path is None:
        print(line, flush=True)
    else:
        with path.open("a") as file:
            file.write(line + "\n")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model, with checkpoints.")
    parser.add_argument("--root", required=True, help="folder of the run's checkpoints")
    parser.add_argument("--start-from", help="checkpoint of another run; else the newest below ROOT, if any")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix (tensor parallelism)")
    parser.add_argument("--steps", type=int, default=24, help="steps of the whole run")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=16, help="rows of a global batch")
    parser.add_argument("--length", type=int, default=64, help="bytes of a row")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate at the start")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of features dropped in training")
    parser.add_argument(
        "--dropout-steps", type=int, default=16, help="steps with dropout; later ones have none"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and dropout")
    parser.add_argument("--journal", type=Path, help="file for a JSON line per event; else they are printed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
