"""When can the steps of an optimizer be made to wait?"""

from __future__ import annotations

import gc
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reknit.frameworks.torch.state_memory import barriers
from tests.devices import every_device
from tests.tables import table


def made(kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer: torch.optim.Optimizer = kind([parameter], lr=0.1, **options)
    return optimizer


def test_a_barrier_stands_once_a_step_has_passed_it_since_it_was_asked_for() -> None:
    optimizer = made()
    (barrier,) = barriers(optimizer)
    assert list(barriers(optimizer)) == [barrier]
    optimizer.step()
    assert not barrier.stands(), "nobody could see that step"
    assert not barrier.stands()
    for _ in range(2):
        optimizer.step()
        assert barrier.stands()
    assert not barrier.stands()
    optimizer.step()
    barrier.distrust()
    assert not barrier.stands()


def test_a_step_waits_and_waits_again_after_an_interrupt() -> None:
    optimizer, come = made(), []
    (barrier,) = barriers(optimizer)
    barrier.stands()

    def wait() -> None:
        come.append(optimizer.param_groups[0]["params"][0].detach().tolist())
        if len(come) == 1:
            raise KeyboardInterrupt

    barrier.hold(wait)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    optimizer.step()
    assert come == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
@table("compiled", [True, False])
def test_steps_that_can_run_without_their_hooks_are_not_trusted_ever(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = made()
    (barrier,) = barriers(optimizer)
    barrier.stands()
    barrier.hold(lambda: pytest.fail("this runs inside of compiled code"))
    if compiled:
        step: Any = torch.compile(optimizer.step, backend="eager")
        step()
    else:
        optimizer.param_groups[0]["capturable"] = True
    caplog.clear()
    assert not barrier.stands()
    optimizer.param_groups[0]["capturable"] = False
    if compiled:
        torch._dynamo.reset()
    assert not barrier.stands()
    assert sum("cannot be made to wait" in record.message for record in caplog.records) == 1


def test_a_barrier_has_the_memory_of_parameters_and_states_that_is_one_run() -> None:
    optimizer = made(torch.optim.AdamW)
    cut = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    cut.grad = torch.ones(4, 2)
    optimizer.add_param_group({"params": [cut]})
    optimizer.step()
    (barrier,) = barriers(optimizer)
    have = [optimizer.param_groups[0]["params"][0]]
    have += [s for states in optimizer.state.values() for s in states.values() if s.is_contiguous()]
    assert sorted(barrier.memory()) == sorted(("cpu", t.data_ptr(), t.nbytes) for t in have)


@every_device
def test_steps_that_a_device_captures_are_not_trusted(
    device_type: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.ones(1, device=device_type)
    optimizer = made()
    (barrier,) = barriers(optimizer)
    barrier.stands()
    barrier.hold(lambda: pytest.fail("this runs inside of captured code"))
    monkeypatch.setattr(torch.get_device_module(device_type), "is_current_stream_capturing", lambda: True)
    optimizer.step()
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "reknit"):
        assert not barrier.stands()
        assert not barrier.stands()
    assert sum("cannot be made to wait" in record.message for record in caplog.records) == 1


@every_device
def test_memory_of_devices_is_told_apart_where_addresses_do_not(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = made()
    whole = torch.ones(4, 3, device=device_type)
    optimizer.add_param_group({"params": [torch.nn.Parameter(row) for row in whole]})
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 64)
    (barrier,) = barriers(optimizer)
    on_host, *rows = barrier.memory()
    assert on_host == ("cpu", 64, 12)
    assert len({memory for memory, _, _ in rows}) == 1
    assert [(start, nbytes) for _, start, nbytes in rows] == [(0, 12), (12, 12), (24, 12), (36, 12)]
    other = torch.nn.Parameter(torch.ones(3, device=device_type))
    optimizer.add_param_group({"params": [other]})
    assert [*barrier.memory()][-1][0] not in {memory for memory, _, _ in rows}


def test_wrappers_lists_and_circles_of_optimizers_are_looked_into() -> None:
    inner, other = made(), made()
    inner.sibling = other  # type: ignore[attr-defined]
    other.sibling = inner  # type: ignore[attr-defined]
    wrapper = SimpleNamespace(optimizer=inner, chained=[other, made()], name="x")
    assert len(list(barriers(wrapper))) == 3
    assert list(barriers({"state": {}, "param_groups": []})) == []

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    assert list(barriers(Wrapper(inner))) == list(barriers(inner))


def test_a_barrier_keeps_no_optimizer_alive() -> None:
    optimizer = made()
    (barrier,) = barriers(optimizer)
    barrier.stands()
    alive = threading.Event()
    import weakref

    weakref.finalize(optimizer, alive.set)
    del optimizer
    gc.collect()
    assert alive.is_set()
