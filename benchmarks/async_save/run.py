"""What does a background save cost the trainer?  reknit, torch DCP in every mode, torch_checkpointing, and
plain memory and disk, in one run.

Two ranks hold 1 GiB each of one model's state as FSDP2 would (see `benchmarks/save_load/run.py`).  Every
contender makes several saves in a row, and then saves during which the trainer computes.  Times are those
until the state may be changed and until the checkpoint exists, of the first save and the median of the
later ones.  Memory and disk are measured with the same bytes by the same two processes at once.  Then four
ranks save one model under DDP, and the bytes that each rank writes are counted.  Prints JSON, and the ratios
with their aims to stderr.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.aims import judged, ratio, show
from benchmarks.async_save.measure import Effort, baselines, copier, measure, memcpy
from benchmarks.load.measure import tensors
from benchmarks.load.states import build
from benchmarks.ranks import Bench, deliver, launch, options, rank_main, scratch
from benchmarks.rivals import background

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.aims import Row

PARTS = ("baselines", "reknit", "lazy", "prepared", "slow", "dcp", "torch_checkpointing", "ddp")


def sharded_part(args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of a state sharded over all ranks."""
    import torch

    bench = Bench(args.dir)
    state = build(args.gib, bench.world)
    owned = tensors(state)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "world": bench.world,
        "gib_per_rank": round(sum(t.nbytes for t in owned) / (1 << 30), 3),
        "tensors_per_rank": len(owned),
        "load_average_before": os.getloadavg()[0],
    }
    if "baselines" in args.parts:
        result["baselines"] = baselines(bench, owned, 2 if args.quick else 4)
    result["contenders"] = {}

    def compete(
        name: str,
        make: Callable[[], background.Contender],
        effort: Effort,
        copy: Callable[[], float] | None = None,
    ) -> None:
        result["contenders"][name] = _measured(bench, name, make, effort, copy)

    own, other, slow, prepared = _efforts(args)
    if "reknit" in args.parts:
        copy = copier(owned)
        once = partial(bench.best, 1, copy, lambda: None)
        compete("reknit", lambda: background.reknit_contender(state), own, once)
        del copy, once
    if "lazy" in args.parts:
        compete("reknit, lazy", lambda: background.lazy_contender(state), own)
    if "prepared" in args.parts:
        compete("reknit, prepared", lambda: background.prepared_contender(state, bench.folder), prepared)
        found = result["contenders"]["reknit, prepared"]
        result["first_save_blocking_after_prepare"] = found.get("blocking_first_s")
    if "slow" in args.parts:
        sleep_s = 0.3 if args.quick else 5.0
        compete("reknit, slow storage", lambda: background.slow_contender(state, sleep_s), slow)
    if "dcp" in args.parts:
        modes = background.DCP_QUICK_MODES if args.quick else background.DCP_MODES
        for name, make in background.dcp_contenders(state, modes):
            compete(name, make, other)
        background.end_dcp_process()
    if "torch_checkpointing" in args.parts:
        compete("torch_checkpointing", lambda: background.torch_checkpointing_contender(state), other)
    result["noise"] = _noise(bench, result, owned)
    return result


def _noise(bench: Bench, result: dict[str, Any], owned: list[Any]) -> dict[str, float]:
    """Return ratios between repetitions of the same work, which are 1 on a perfectly quiet machine.

    The quicker of the two copies counts as the baseline.
    """
    alone = [
        found["computing"]["steps_per_s_alone"]
        for found in result["contenders"].values()
        if "computing" in found
    ]
    noise: dict[str, float] = {}
    if alone:
        noise["training_alone_fastest_over_slowest"] = round(max(alone) / min(alone), 2)
    if "baselines" in result:
        base, after = result["baselines"], memcpy(bench, owned)
        noise["memcpy_after_over_before"] = round(after / base["memcpy_s"], 2)
        base["memcpy_s"] = min(base["memcpy_s"], round(after, 4))
    bench.say(f"noise: {noise}, load average before {result['load_average_before']:.1f}")
    return noise


def _efforts(args: argparse.Namespace) -> tuple[Effort, Effort, Effort, Effort]:
    """Return the efforts for reknit, its rivals, reknit on slow storage, and reknit after `prepare`."""
    few = Effort(2, 0, 60.0, 30) if args.quick else Effort(3, 0, 40.0, 100)
    if args.quick:
        return (Effort(3, 1, 60.0, 30),) * 2 + (few, few)
    return (
        Effort(args.saves, 3, 40.0, 100),
        Effort(min(4, args.saves), 1, args.rival_s, 100),
        few,
        few,
    )


def _measured(
    bench: Bench,
    name: str,
    make: Callable[[], background.Contender],
    effort: Effort,
    copy: Callable[[], float] | None,
) -> dict[str, Any]:
    """Return a contender's times, or the reason for a failure."""
    try:
        contender = make()
        try:
            return measure(bench, contender, effort, copy)
        finally:
            contender.close()
    except Exception as error:  # the failure of a contender is a result too
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, ModuleNotFoundError):
            reason += " (not a dependency; pip install it to measure it)"
        bench.say(f"{name:44s} {reason}")
        return {"error": reason}


def ddp_part(args: argparse.Namespace) -> dict[str, Any]:
    """Return each rank's share of a model that every rank holds whole."""
    import torch

    import reknit

    bench = Bench(args.dir)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(4 if args.quick else 16)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 1024)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    report = reknit.save(f"{args.dir}/ddp", state, wait=False).result()
    staged = sum(record.nbytes for record in report.phases if record.phase == "stage")
    shares: list[Any] = [None] * bench.world
    bench.dist.all_gather_object(shares, (report.nbytes / report.total_nbytes, staged / report.total_nbytes))
    return {
        "world": bench.world,
        "mib": round(report.total_nbytes / (1 << 20), 1),
        "written_share": [round(written, 4) for written, _ in shares],
        "staged_share": [round(staged, 4) for _, staged in shares],
    }


def aims(result: dict[str, Any]) -> list[Row]:
    """Return every ratio with its aim, None for a ratio if one of its parts was not measured."""
    found: dict[str, Any] = {k: v for k, v in result.get("contenders", {}).items() if "error" not in v}
    base = result.get("baselines", {})
    ours, slow = found.get("reknit", {}), found.get("reknit, slow storage", {})
    prepared, lazy = found.get("reknit, prepared", {}), found.get("reknit, lazy", {})
    dcp = [v for k, v in found.items() if k.startswith("DCP")]

    def best(key: str) -> float | None:
        return min((v[key] for v in dcp), default=None)

    def computing(key: str, of: list[dict[str, Any]]) -> float | None:
        return min((v["computing"][key] for v in of if "computing" in v), default=None)

    blocking, whole = ours.get("blocking_s"), ours.get("end_to_end_s")
    slowdown, lost = (computing(key, [ours] if ours else []) for key in ("slowdown", "lost_s"))
    # Equal within noise, which is the distance between two saves to the fast storage.
    spread = max(1.15, ratio(max(ours.get("blocking_later_s", [0.0])), blocking) or 0.0)
    between = ours.get("memcpy_between_saves_s")
    rows: list[Row] = [
        ("blocking / memcpy between the saves", ratio(blocking, between), "<=", 1.3),
        ("blocking / best memcpy in a hot loop", ratio(blocking, base.get("memcpy_s")), "<=", 1.3),
        ("DCP's best blocking / blocking", ratio(best("blocking_s"), blocking), ">=", 2.0),
        ("DCP's best blocking / lazy blocking", ratio(best("blocking_s"), lazy.get("blocking_s")), ">=", 5.0),
        ("blocking on slow storage / blocking", ratio(slow.get("blocking_s"), blocking), "<=", spread),
        (
            "first save after prepare / later ones, blocking",
            ratio(prepared.get("blocking_first_s"), prepared.get("blocking_s")),
            "<=",
            1.3,
        ),
        ("end to end / raw write", ratio(whole, base.get("raw_write_s")), "<=", 1.25),
        ("DCP's best end to end / end to end", ratio(best("end_to_end_s"), whole), ">=", 3.0),
        ("slowdown of the trainer, against DCP's least", slowdown, "<=", computing("slowdown", dcp)),
        ("seconds that a save costs the trainer, against DCP's least", lost, "<=", computing("lost_s", dcp)),
    ]
    shares = result.get("ddp")
    if shares is not None:
        for key in ("written_share", "staged_share"):
            off = max(abs(share * shares["world"] - 1) for share in shares[key]) / shares["world"]
            rows.append((f"DDP: {key.replace('_', ' ')}, farthest from equal", round(off, 4), "<=", 0.01))
    return rows


def main() -> int:
    parser = options(__doc__, timeout_s=600.0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of state over all ranks")
    parser.add_argument("--saves", type=int, default=7, help="consecutive saves of reknit")
    parser.add_argument("--rival-s", type=float, default=11.0, help="seconds after which a rival has enough")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.gib = min(args.gib, 0.1)
    if args.role:
        rank_main(args, partial(sharded_part if args.role == "sharded" else ddp_part, args))
    result: dict[str, Any] = {}
    with scratch(args.dir) as folder:
        if set(args.parts) - {"ddp"}:
            result = launch(__file__, "sharded", args.world, folder, args.timeout)
        if "ddp" in args.parts:
            result["ddp"] = launch(__file__, "ddp", 4, folder, args.timeout)
    result["aims"] = judged(aims(result))
    deliver(result, args.out)
    show(result["aims"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
