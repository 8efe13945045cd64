"""The optimizers of torch, bitsandbytes, heavyball and pytorch_optimizer: how each is made and stepped."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.optimizers.trial import usual

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import nn

    from benchmarks.optimizers.trial import Make, Step

PACKAGES = {
    "torch.optim": "torch",
    "bitsandbytes.optim": "bitsandbytes",
    "heavyball": "heavyball",
    "pytorch_optimizer": "pytorch-optimizer",
}
"""Modules with optimizers, and the packages that install them."""

LR = 0.01


class Maker(NamedTuple):
    """An optimizer: `why` is the reason why it cannot be tried, if it cannot."""

    name: str
    make: Make
    step: Step = usual
    why: str | None = None


def closed(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step with a closure."""

    def closure() -> Any:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    optimizer.step(closure)


def reclosed(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step after a backward pass, with a closure for the second."""

    def closure() -> Any:
        found = loss()
        found.backward()
        return found

    closure()
    optimizer.step(closure)
    optimizer.zero_grad()


def graded(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step with a closure, which computes gradients though the optimizer disables them."""

    def closure() -> Any:
        with torch.enable_grad():
            optimizer.zero_grad()
            found = loss()
            found.backward()
        return found

    optimizer.step(closure)


def sparse(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step with sparse gradients."""
    optimizer.zero_grad()
    loss().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_sparse()
    optimizer.step()


def graphed(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Take a step that needs the graph of the gradients."""
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss().backward(create_graph=True)
    optimizer.step()


def fused(model: nn.Module, optimizer: Any, loss: Callable[[], Any]) -> None:
    """Step while the gradients are computed."""
    optimizer.fused_backward(loss(), LR)


def _matrices(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.ndim == 2]


def _mixed(model: nn.Module, **more: Any) -> list[dict[str, Any]]:
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": _matrices(model), "use_muon": True, **more},
        {"params": others, "use_muon": False, **more},
    ]


def _inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def makers(modules: Collection[str] = tuple(PACKAGES)) -> Iterator[tuple[str, str, Maker]]:
    """Yield module, version and maker of each optimizer of these modules that is installed."""
    for module, package in PACKAGES.items():
        if module not in modules:
            continue
        try:
            found = import_module(module)
        except ImportError:
            continue
        if module == "heavyball":
            found.utils.compile_mode = None
        for name, kind in sorted(vars(found).items()):
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name[0] != "_":
                maker = _maker(module, name, kind)
                if maker is not None:
                    yield module, version(package).partition("+")[0], maker


def _maker(module: str, name: str, kind: Any) -> Maker | None:
    if kind is torch.optim.Optimizer or name.endswith("Base"):
        return None
    more: dict[str, Any] = {}
    if module == "bitsandbytes.optim":
        if "8bit" in name:
            more["min_8bit_size"] = 16
        if "SGD" in name or "LARS" in name:
            more["momentum"] = 0.9
    if (module, name) in SPECIAL:
        special = SPECIAL[module, name]
        if isinstance(special, str):
            return Maker(name, lambda model: None, why=special)
        make, step = special if isinstance(special, tuple) else (special, usual)
        return Maker(name, lambda model: make(kind, model), step)
    return Maker(name, lambda model: kind(model.parameters(), lr=LR, **more))


def _around(kind: Any, model: nn.Module) -> Any:
    return kind(_inner(model))


def _sam(kind: Any, model: nn.Module) -> Any:
    return kind(model.parameters(), base_optimizer=torch.optim.AdamW, lr=LR)


def _muon(kind: Any, model: nn.Module) -> Any:
    return kind(_mixed(model), lr=LR)


def _split(kind: Any, model: nn.Module) -> Any:
    heavyball = import_module("heavyball")
    others = [p for p in model.parameters() if p.ndim != 2]
    return kind(
        [
            {"params": _matrices(model), "optimizer": heavyball.AdamW, "lr": LR},
            {"params": others, "optimizer": heavyball.SGD, "lr": LR},
        ]
    )


P, T, H = "pytorch_optimizer", "torch.optim", "heavyball"

SPECIAL: dict[tuple[str, str], Any] = {
    (T, "LBFGS"): (lambda k, m: k(m.parameters(), lr=0.1, line_search_fn="strong_wolfe"), closed),
    (T, "Muon"): lambda k, m: k(_matrices(m), lr=LR),
    (T, "SparseAdam"): (lambda k, m: k(m.parameters(), lr=LR), sparse),
    (H, "SAMWrapper"): (lambda k, m: k(m.parameters()), closed),
    (H, "SplitOpt"): _split,
    (P, "LBFGS"): (lambda k, m: k(m.parameters(), lr=0.1, line_search_fn="strong_wolfe"), closed),
    (P, "BSAM"): (lambda k, m: k(m.parameters(), num_data=100, lr=LR), reclosed),
    (P, "AliG"): (lambda k, m: k(m.parameters(), max_lr=LR), graded),
    (P, "LOMO"): (lambda k, m: k(m, lr=LR), fused),
    (P, "AdaLOMO"): (lambda k, m: k(m, lr=LR), fused),
    (P, "AdamMini"): lambda k, m: k(m, lr=LR),
    (P, "Ranger21"): lambda k, m: k(m.parameters(), num_iterations=100, lr=LR),
    (P, "Muon"): _muon,
    (P, "AdaMuon"): _muon,
    (P, "AdaGO"): _muon,
    (P, "NorMuon"): _muon,
    (P, "SpectralSphere"): lambda k, m: k(_matrices(m), lr=LR),
    (P, "MuonClip"): lambda k, m: k(_mixed(m), model=None, lr=LR),
    (P, "DistributedMuon"): "needs a process group",
    (P, "AdaHessian"): (lambda k, m: k(m.parameters(), lr=LR), graphed),
    (P, "SophiaH"): (lambda k, m: k(m.parameters(), lr=LR), graphed),
    (P, "SAM"): (_sam, reclosed),
    (P, "FriendlySAM"): (_sam, reclosed),
    (P, "LookSAM"): (_sam, reclosed),
    (P, "WSAM"): (lambda k, m: k(m, m.parameters(), base_optimizer=torch.optim.AdamW, lr=LR), reclosed),
    (P, "GSAM"): "needs a scheduler and a data set of its own",
    (P, "TRAC"): _around,
    (P, "Lookahead"): _around,
    (P, "Magma"): _around,
    (P, "OrthoGrad"): _around,
    (P, "PCGrad"): "steps by a call of its own for several losses",
    (P, "ScheduleFreeWrapper"): lambda k, m: _training(k(_inner(m))),
    (P, "SafeFP16Optimizer"): (_around, lambda m, o, loss: (o.zero_grad(), o.backward(loss()), o.step())),
    (P, "DeMo"): "needs a process group",
}


def _training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer
