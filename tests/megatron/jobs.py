"""The jobs of the matrix of layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import reknit
from reknit.frameworks.registry import collect
from tests import values
from tests.frameworks.silence import Silence
from tests.megatron.layouts import FAMILIES, WORDS

if TYPE_CHECKING:
    from tests.megatron.gpt import Trained

WAYS = ("full", "lenient", "renamed")
OPTIONS = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)


def save_all(root: str, world: int, chosen: dict[str, list[str]]) -> None:
    """Train and save all chosen layouts of so many ranks."""
    from tests.megatron import gpt, truth

    for family, layouts in FAMILIES.items():
        for name, layout in layouts.items():
            if layout.world != world or name not in chosen[family]:
                continue
            trained = gpt.build(layout)
            _change_options(trained)
            rank = torch.distributed.get_rank()
            with Silence():
                collect(trained.state(), rank, world)
            state = trained.state() | {"values": values.filled()}
            report = reknit.save(f"{root}/{family}/{name}", state, step=2, options=OPTIONS).result()
            assert report.warnings == (), report.warnings
            known = truth.truth(trained)
            if rank == 0:
                torch.save(known, f"{root}/{family}/{name}.truth")


def _change_options(trained: Trained) -> None:
    """Change the options of the groups."""
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.125 * (1 + group["wd_mult"])
        group["max_lr"] = 0.5


def load_all(
    root: str, world: int, sources: dict[tuple[str, str], list[str]]
) -> dict[tuple[str, str, str], list[str]]:
    """Load the `sources` of every layout of so many ranks into it, and return the differences."""
    from tests.megatron import gpt

    differing = {}
    for family, layouts in FAMILIES.items():
        for name, layout in layouts.items():
            if layout.world != world or (family, name) not in sources:
                continue
            trained = gpt.build(layout, steps=0, seed=1)
            for number, source in enumerate(sources[family, name]):
                # Every second time the optimizer already has states of another training.
                _forget(trained, keep_states=number % 2 == 1)
                way = WAYS[number % len(WAYS)]
                wrong = _load(f"{root}/{family}/{source}", trained, way, with_values=source == name)
                differing[family, source, name] = wrong
            gpt.train(trained, 1)
    return differing


def _forget(trained: Trained, *, keep_states: bool) -> None:
    """Replace all values of a model and its optimizer by wrong ones."""
    with torch.no_grad():
        for chunk in trained.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7.0)
        for optimizer in trained.optimizer.chained_optimizers:
            inner = optimizer.optimizer
            for group in inner.param_groups:
                group["lr"] = 77.0
                group.pop("step", None)
                for main in group["params"]:
                    main.fill_(7.0)
            for states in inner.state.values():
                for state in states.values():
                    state.fill_(7.0)
            if not keep_states:
                inner.state.clear()


def _load(path: str, trained: Trained, way: str, *, with_values: bool) -> list[str]:
    """Load a checkpoint, on demand with values of every kind, and return the differences."""
    from tests.megatron import truth

    state = trained.state()
    if way == "lenient":
        state["more"] = 5
    if with_values:
        state["values"] = values.blank()
    rules = [reknit.transforms.names({"model/": "weights/"})] if way == "renamed" else []
    if way == "renamed":
        state["weights"] = state.pop("model")
    options = reknit.LoadOptions(timeout_s=120, transforms=rules)
    report = reknit.load(path, state, strict=way != "lenient", options=options)
    assert list(report.missing) == ["more"] * (way == "lenient"), report.missing
    assert not report.unexpected, report.unexpected
    assert report.step == 2
    expected = torch.load(f"{path}.truth", weights_only=False)
    beside = values.differing(values.filled(), state["values"], "values") if with_values else []
    return compare(expected, truth.truth(trained)) + beside


def compare(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names of all differences; of padded vocabularies, only the words are compared."""
    wrong = sorted(set(expected) ^ set(found))
    for name in expected.keys() & found.keys():
        a, b = expected[name], found[name]
        if isinstance(a, torch.Tensor):
            if "word_embeddings" in name or "output_layer" in name:
                a, b = a[:WORDS], b[:WORDS]
            if a.dtype != b.dtype or not torch.equal(a, b):
                wrong.append(name)
        elif a != b:
            wrong.append(f"{name}: {a} {b}")
    return wrong
