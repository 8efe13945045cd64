"""Train with the Trainer of transformers, and go on after any interruption: run the same command again.

python examples/trainers/hf_trainer.py runs --steps 40
torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py runs --steps 40

Saves continue in the background.  A run resumes on any number of ranks; on the same number it ends with the
bits of a run without an interruption.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from reknit.integrations.transformers import ReknitTrainer


def batch_of(samples: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return samples as arguments of the model."""
    ids = torch.stack([tokens for (tokens,) in samples])
    return {"input_ids": ids, "labels": ids}


def trainer_for(folder: str, num_steps: int) -> ReknitTrainer:
    """Return a trainer for a tiny model on random tokens, which saves every fifth step."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    args = TrainingArguments(
        output_dir=folder,
        max_steps=num_steps,
        save_steps=5,
        save_total_limit=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        seed=0,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 64, (64, 16)))
    return ReknitTrainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=data, data_collator=batch_of
    )


def main() -> None:
    """Read the arguments, train, and write the model for `from_pretrained`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the steps and the final model are saved")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    trainer = trainer_for(args.folder, args.steps)
    trainer.train(resume_from_checkpoint=True)  # begins with step 0 if there is no step yet
    trainer.save_model()


if __name__ == "__main__":
    main()
