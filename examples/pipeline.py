"""Pre-train, evaluate each step meanwhile, then fine-tune: three jobs, three layouts, and no conversion.

torchrun --nproc-per-node 2 examples/pipeline.py pretrain run        # FSDP2 on two ranks
python examples/pipeline.py evaluate run                             # at the same time, in one process
torchrun --nproc-per-node 4 examples/pipeline.py finetune run tuned  # TP 2 x FSDP 2, four more words

The evaluation adds the accuracy to each step, and pins the first step that is good enough.  Pre-training then
ends, and fine-tuning starts from that step: from its model alone.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reknit
from reknit.policies import every, latest

NUM_WORDS, NUM_MARKERS = 64, 4
"""Words of the pre-training, and markers of a dialogue that fine-tuning adds."""
GOAL, MAX_STEPS, STEPS_PER_SAVE = 0.95, 20_000, 10


class LanguageModel(nn.Module):
    """Predict the next word from the last one."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, num_words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logarithms of the probabilities of the next words."""
        hidden = self.embed(words)
        return F.log_softmax(self.head(hidden + self.down(F.relu(self.up(hidden)))), dim=-1)


def next_words(words: Tensor) -> Tensor:
    """Return the words that follow: each word, and each marker, always has the same successor."""
    markers = NUM_WORDS + (words + 1) % NUM_MARKERS
    return torch.where(words < NUM_WORDS, (5 * words + 7) % NUM_WORDS, markers)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, num_words: int) -> float:
    """Train on random words, and return the loss of this rank."""
    words = torch.randint(num_words, (32,))
    loss = F.nll_loss(model(words), next_words(words))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def most_accurate(folder: str) -> tuple[float, str]:
    """Return the highest accuracy that the evaluation has added to a step, and the path of that step."""
    found = [(step.metrics or {}, step.path) for step in reknit.steps(folder)]
    return max(((metrics.get("accuracy") or 0.0, path) for metrics, path in found), default=(0.0, ""))


def goal_reached(folder: str) -> bool:
    """Return on all ranks whether rank 0 finds a step that is accurate enough."""
    reached = torch.tensor(dist.get_rank() == 0 and most_accurate(folder)[0] >= GOAL)
    dist.broadcast(reached, 0)
    return bool(reached)


def pretrain(folder: str) -> int:
    """Train with FSDP2 until the evaluation finds an accurate step, and return the last step."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = LanguageModel(NUM_WORDS)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    state = {"model": model, "optimizer": optimizer, "rng": reknit.RngState()}
    with reknit.Checkpointer(folder, save=every(steps=STEPS_PER_SAVE), keep=latest(2)) as run:
        for step in range(run.resume(state), MAX_STEPS):
            loss = train_step(model, optimizer, NUM_WORDS)
            run.save(step, state, metrics={"loss": loss})
            if step % STEPS_PER_SAVE == 0 and goal_reached(folder):
                break
    return step


def evaluate(folder: str, idle_s: float = 60.0) -> dict[int, float]:
    """Return the accuracy of each step, until one is high enough or no step has come for `idle_s` seconds."""
    found = {}
    model, words = LanguageModel(NUM_WORDS), torch.arange(NUM_WORDS)
    for step in reknit.watch(folder, name="eval", poll_s=0.2, idle_s=idle_s):
        reknit.load(step.path, {"model": model})
        with torch.no_grad():
            accuracy = (model(words).argmax(-1) == next_words(words)).float().mean().item()
        reknit.note(step.path, {"accuracy": accuracy}, write_id=step.write_id)
        print(f"step {step.step}: accuracy {accuracy:.2f}", flush=True)
        found[step.step or 0] = accuracy
        if accuracy >= GOAL:
            reknit.pin(step.path, reason=f"accuracy {accuracy:.2f}")  # `keep` leaves it there
            break
    return found


def finetune(folder: str, tuned: str, num_steps: int = 60) -> float:
    """Train the most accurate model in another layout, with more words, and return the last loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(NUM_WORDS + NUM_MARKERS)
    layout = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], layout)
    fully_shard(model, mesh=mesh["dp"])

    # Only the model is in the state, so nothing else is read.  The rows of the new words keep their values.
    grown = reknit.LoadOptions(allow_shape_mismatch=("model/embed.weight", "model/head.weight"))
    report = reknit.load(most_accurate(folder)[1], {"model": model}, options=grown)
    if dist.get_rank() == 0:
        print(f"loaded {report.path}, without {', '.join(report.left)}; grown: {report.mismatched}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(1 + mesh["dp"].get_local_rank())
    loss = math.nan
    for _ in range(num_steps):
        loss = train_step(model, optimizer, NUM_WORDS + NUM_MARKERS)
    reknit.save(f"{tuned}/step_{num_steps:08d}", {"model": model, "optimizer": optimizer}, step=num_steps)
    return loss


def main() -> None:
    """Run one of the three jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("pretrain", "evaluate", "finetune"))
    parser.add_argument("folder", help="where pre-training saves its steps")
    parser.add_argument("tuned", nargs="?", default="tuned", help="where fine-tuning saves its step")
    args = parser.parse_args()
    if args.job == "evaluate":
        evaluate(args.folder)
        return
    dist.init_process_group("gloo")
    try:
        if args.job == "pretrain":
            last: float = pretrain(args.folder)
            what = "last step"
        else:
            last, what = finetune(args.folder, args.tuned), "last loss"
        if dist.get_rank() == 0:
            print(f"{what}: {last}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
