"""Read data on any number of ranks, each with worker processes: what a data loader is saved and resumed like.

Every rank runs this file, started by run.py, and writes down each sample that it consumes.  There is no
model here, so nothing of torch: the ranks meet in a folder.  With one, the loader is an entry beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path

from documents import token_sets

import reknit
from reknit.dataloader import ReaderPlace, TokenLoader


def main() -> None:
    """Read from where the newest checkpoint was, or from the beginning, and save now and then."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", required=True, help="folder of the run's checkpoints")
    parser.add_argument("--meeting", type=Path, required=True, help="folder in which the ranks meet")
    parser.add_argument(
        "--ledger", required=True, help="name of the file for what is consumed, less the rank"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that read for each rank")
    parser.add_argument("--save-every", type=int, default=0, help="batches between checkpoints, 0 for none")
    args = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    loader = TokenLoader(
        token_sets(),
        token_budget=8192,
        place=ReaderPlace(rank, size),
        num_workers=args.workers,
        save_every=args.save_every or None,
        dtype="uint8",
    )
    group = reknit.connect(rank, size, at=args.meeting, job=args.ledger)
    state = {"loader": loader}
    if newest := reknit.latest(args.root):
        reknit.load(newest, state, group=group)
    step = 0
    with Path(f"{args.ledger}-{rank}.jsonl").open("w", buffering=1) as ledger:
        while batches := list(islice(loader, 1)):
            step += 1
            ledger.write(json.dumps({"step": step, "samples": batches[0].samples.tolist()}) + "\n")
            if args.save_every and step % args.save_every == 0:
                reknit.save(f"{args.root}/step_{step:08d}", state, step=step, group=group)
    loader.close()
    group.close()


if __name__ == "__main__":
    main()
