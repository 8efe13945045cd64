"""One process with a checkpoint that several ranks saved: look, load, check, export.

run.py runs it last; by hand it is

    python examples/demo/one_process.py CHECKPOINT SCRATCH_FOLDER --held-out 64
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checks import Check, table, write_checks
from safetensors import safe_open
from source_text import held_out_rows, read_text
from tiny_llama import Config, TinyLlama, loss_of
from transformers import AutoModelForCausalLM

import reknit
from reknit.integrations.hugging_face.export import export_hf

WEIGHT = "model.layers.0.mlp.down_proj.weight"


def load_model(path: Path, rows: torch.Tensor, seed: int) -> tuple[TinyLlama, list[Check]]:
    """Load the model alone into one process, and compare its loss with that of fresh weights."""
    torch.manual_seed(seed)
    model = TinyLlama(Config()).eval()
    with torch.no_grad():
        before = float(loss_of(model, rows))
        report = reknit.load(path, {"model": model})
        after = float(loss_of(model, rows))
    total = sum(file.nbytes for file in reknit.open(path).manifest.files)
    share = f"{report.nbytes_read:,} of {total:,} bytes"
    return model, [
        Check("load the model alone", "a part of the bytes", share, report.nbytes_read < total / 2),
        Check("loss on held-out text", "lower", f"{before:.3f} -> {after:.3f}", after < before - 1.0),
    ]


def look(path: Path, model: TinyLlama) -> list[Check]:
    """Read a slice of a tensor, open a file without reknit, and verify everything."""
    checkpoint = reknit.open(path)
    piece = checkpoint.read("model", WEIGHT, (slice(10, 30), slice(75, 85)), framework="torch")
    same = torch.equal(piece, model.get_parameter(WEIGHT).detach()[10:30, 75:85])
    verified = reknit.verify(path, "data")
    file = min((path / "model").glob("*.safetensors"))
    with safe_open(file, framework="pt") as plain:
        num_finite = sum(bool(plain.get_tensor(name).isfinite().all()) for name in plain.keys())  # noqa: SIM118
        num_tensors = len(plain.keys())
    found = f"{verified.num_files} files, {len(verified.problems)} problems"
    return [
        Check("read a slice of a tensor", "equal", "equal" if same else "differs", same),
        Check("verify every byte", "no problem", found, verified.ok),
        Check(
            "open a data file with safetensors",
            "opens",
            f"{num_finite} finite tensors of {num_tensors}",
            num_finite == num_tensors > 0,
        ),
    ]


def export(path: Path, out: Path, model: TinyLlama, rows: torch.Tensor) -> list[Check]:
    """Export to Hugging Face, load that with transformers, and compare logits."""
    report = export_hf(path, out)
    (out / "config.json").write_text(json.dumps(Config().hugging_face(), indent=2))
    loader: Any = AutoModelForCausalLM
    theirs, info = loader.from_pretrained(out, output_loading_info=True)
    complaints = sum(len(found) for found in info.values())
    with torch.no_grad():
        ours, logits = model(rows), theirs.eval()(rows).logits
    difference = float((ours - logits).abs().max())
    return [
        Check(
            "export, load with transformers",
            "all tensors fit",
            f"{report.num_tensors} tensors, {complaints} complaints",
            complaints == 0 and report.num_tensors == len(model.state_dict()),
        ),
        Check("  logits of transformers and ours", "within 1e-4", f"{difference:.1e}", difference <= 1e-4),
    ]


def damage(path: Path, copy: Path) -> list[Check]:
    """Flip one bit in a copy of the checkpoint, and try to load that."""
    shutil.copytree(path, copy)
    file = max((copy / "model").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-100] ^= 0b100
    file.write_bytes(data)
    try:
        reknit.load(copy, {"model": TinyLlama(Config())})
        told = "loaded"
    except reknit.CorruptError as error:
        told = f"CorruptError, {file.name if file.name in str(error) else 'file not named'}"
        print(f"the damaged copy is refused:\n  {error}")
    problems = reknit.verify(copy, "data").problems
    found = sum(file.name in problem for problem in problems)
    return [
        Check("load a copy with one bit flipped", "refused, file named", told, told.endswith(file.name)),
        Check(
            "  verify the copy",
            "1 problem, file named",
            f"{len(problems)} problem, {found} named",
            found == len(problems) == 1,
        ),
    ]


def main() -> int:
    """Run all of it, print the table or hand it over."""
    parser = argparse.ArgumentParser(description="Look into a checkpoint, load, check and export it.")
    parser.add_argument("checkpoint", type=Path, help="checkpoint of train.py")
    parser.add_argument("scratch", type=Path, help="folder for the export and a damaged copy")
    parser.add_argument("--held-out", type=int, default=64, help="rows of held-out text to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights that training began with")
    parser.add_argument("--checks", type=Path, help="file for the results; else they are printed")
    args = parser.parse_args()
    rows = held_out_rows(read_text(), args.held_out, 65)
    model, checks = load_model(args.checkpoint, rows, args.seed)
    checks += look(args.checkpoint, model)
    checks += export(args.checkpoint, args.scratch / "hugging-face", model, rows)
    checks += damage(args.checkpoint, args.scratch / "damaged")
    if args.checks:
        write_checks(args.checks, checks)
        return 0
    print(table(checks))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
