"""A CUDA device that is none: its work is queued in streams, and run only as far as somebody waits."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from reknit.engine.memory import staging
from reknit.engine.memory.elements import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


class Queue:
    """A stream: work in order, run only as far as somebody waits for."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        self.work: deque[Callable[[], Any]] = deque()

    def wait_stream(self, other: Queue) -> None:
        end = Mark()
        end.record(other)
        self.wait_event(end)

    def wait_event(self, event: Mark) -> None:
        self.work.append(event.reach())

    def drain(self) -> None:
        while self.work:
            self.work.popleft()()


class Mark:
    """An event: a place in a stream."""

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.passed = [True]
        self.stream: Queue | None = None

    def record(self, stream: Queue) -> None:
        self.passed, self.stream = (passed := [False]), stream
        stream.work.append(lambda: passed.__setitem__(0, True))

    def reach(self) -> Callable[[], None]:
        passed, stream = self.passed, self.stream

        def run() -> None:
            while not passed[0]:
                assert stream is not None
                stream.work.popleft()()

        return run

    def synchronize(self) -> None:
        assert self.blocking, "the waiting thread takes a core instead of sleeping"
        self.reach()()


class Away(torch.Tensor):
    """A tensor on the queued device: copies from it to the host, and into new memory there, are queued."""

    queues: Queues

    @property
    def device(self) -> Any:  # type: ignore[override]
        return torch.device("cuda", 0)

    def record_stream(self, stream: Any) -> None:
        self.queues.kept.append((self.untyped_storage().data_ptr(), stream))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_ and isinstance(args[1], Away):
                assert kwargs == {"non_blocking": True}
                return cls.queues.send(lambda: args[0].copy_(args[1].as_subclass(torch.Tensor)))
            if func.__name__ in ("cat", "ne", "__ne__", "any"):
                return cls._queued(func, args)
            if func is torch.Tensor.cpu:
                cls.queues.current.drain()
                return args[0].as_subclass(torch.Tensor)
            if func is torch.Tensor.contiguous and not args[0].is_contiguous():
                fresh = torch.empty(args[0].shape, dtype=args[0].dtype)
                cls.queues.taken.append((fresh.nbytes, cls.queues.current))
                cls.queues.send(lambda: fresh.copy_(args[0].as_subclass(torch.Tensor)))
                return fresh.as_subclass(cls)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def _queued(cls, func: Any, args: Any) -> Any:
        """Queue what makes a new tensor; its shape is known at once."""

        def run() -> torch.Tensor:
            made: torch.Tensor = func(*args)
            return made.as_subclass(torch.Tensor)

        fresh = torch.zeros_like(run())
        cls.queues.send(lambda: _plain(lambda: fresh.copy_(run())))
        return fresh.as_subclass(cls)


def _plain(work: Callable[[], Any]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        work()


class Queues:
    """One device: a stream of the training, those that staging makes, and what was done with memory."""

    def __init__(self) -> None:
        self.compute = self.current = Queue()
        self.kept: list[tuple[int, Any]] = []
        self.taken: list[tuple[int, Queue]] = []

    def send(self, work: Callable[[], Any]) -> None:
        self.current.work.append(work)

    @contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def away(self, tensor: torch.Tensor) -> Any:
        """Return what the engine has of a tensor on the device: its bits."""
        return bits(tensor.as_subclass(Away))


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queues]:
    """Let torch have this device."""
    queues = Queues()
    monkeypatch.setattr(Away, "queues", queues, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queues.current)
    monkeypatch.setattr(torch.cuda, "stream", queues.stream)
    staging.side_stream.cache_clear()
    yield queues
    staging.side_stream.cache_clear()
