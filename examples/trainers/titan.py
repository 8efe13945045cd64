"""Train torchtitan's debug model, with the checkpoint manager of reknit in its config.

    torchrun --nproc-per-node 4 examples/trainers/titan.py FOLDER --steps 20

Kill it at any moment and start it again: it goes on from the newest committed step.
"""

from __future__ import annotations

import argparse
from typing import Any

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from reknit.integrations.torchtitan import ReknitCheckpointManager


def config_of(folder: str, steps: int) -> Any:
    """Return the config of the debug model; only its checkpoints differ from torchtitan's own."""
    config = llama3_debugmodel()
    config.dump_folder = folder
    config.training.steps = steps
    config.checkpoint = ReknitCheckpointManager.Config(
        enable=True, interval=2, keep_latest_k=2, last_save_model_only=False, initial_load_model_only=False
    )
    return config


def main() -> None:
    """Train, and close the manager also after an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    trainer = config_of(arguments.folder, arguments.steps).build()
    try:
        trainer.train()
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
