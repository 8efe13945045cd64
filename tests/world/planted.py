"""Objects with an exception in one of their methods, by the call that raises it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import reknit
from reknit.frameworks.custom import Held, Value
from reknit.types.shard import LoaderShard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PlantedError(Exception):
    """An error that no library raises."""


def fails(*_: Any, **__: Any) -> Any:
    raise PlantedError("boom")


class Keeper:
    def __init__(self, state: Any = 1) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"n": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["n"]


class ByProperty:
    @property
    def state_dict(self) -> Any:
        return fails()

    def load_state_dict(self, state: Any) -> None:
        """Load nothing."""


class Entries(Mapping[str, Any]):
    """A mapping whose entries cannot be read."""

    def __getitem__(self, key: str) -> Any:
        return fails()

    def __iter__(self) -> Iterator[str]:
        yield fails()

    def __len__(self) -> int:
        return 1


class Locked(dict[str, Any]):
    """A dict that refuses other values."""

    def __setitem__(self, key: str, value: Any) -> None:
        fails()


class Stream:
    """A data loader of which all ranks share the state."""

    def stream_state(self) -> Any:
        return {"at": 3}

    def check_stream(self, state: Any) -> None:
        """Accept any state."""

    def load_stream(self, state: Any) -> None:
        """Go on at that position."""


class Shards:
    """A data loader with shards."""

    def replicated_state(self) -> Any:
        return {"epoch": 1}

    def sharded_state(self) -> Any:
        return [LoaderShard(0, 0, 0, 1, 1, {"at": 3})]

    def choose_shards(self, state: Any, shards: Sequence[LoaderShard]) -> Sequence[LoaderShard]:
        return shards

    def load_shards(self, state: Any, shards: Sequence[LoaderShard]) -> None:
        """Go on with these shards."""


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        """Accept the state."""


class Bag:
    """A value of a custom framework, with memory or without."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self.memory = memory


class Bags:
    def __init__(self, failing: str = "") -> None:
        if failing:
            setattr(self, failing, fails)

    def matches(self, value: Any) -> bool:
        return isinstance(value, Bag)

    def holdings(self, value: Bag, rank: int, size: int) -> Iterator[Held | Value]:
        yield Value("n", 1)
        if value.memory is not None:
            yield Held("w", (2,), "float32", (0,), (2,), value.memory)

    def restore(self, value: Bag, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        """Load nothing."""


def planted(make: Callable[[], Any], *names: str) -> Any:
    """Return an object of which a method fails."""
    made = make()
    for name in names:
        setattr(made, name, fails)
    return made


def hooked(name: str) -> nn.Module:
    module = nn.Linear(1, 1)
    getattr(module, name)(fails)
    return module


def stepped(name: str) -> Any:
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.ones(1)))], lr=0.1)
    getattr(optimizer, name)(fails)
    return optimizer


def wrapped(cls: type[Any]) -> Any:
    return cls(planted(Keeper, "state_dict"))


ON_SAVE: dict[str, Callable[[], Any]] = {
    "state_dict": lambda: planted(Keeper, "state_dict"),
    "state_dict as a property": ByProperty,
    "state_dict of a PerRank": lambda: wrapped(reknit.PerRank),
    "state_dict in a container": lambda: {"a": [planted(Keeper, "state_dict")]},
    "__iter__ of a mapping": Entries,
    "stream_state": lambda: planted(Stream, "stream_state"),
    "replicated_state": lambda: planted(Shards, "replicated_state"),
    "sharded_state": lambda: planted(Shards, "sharded_state"),
    "get_extra_state": lambda: planted(Extra, "get_extra_state"),
    "state_dict of a module": lambda: planted(nn.ReLU, "state_dict"),
    "a hook of a module": lambda: hooked("register_state_dict_pre_hook"),
}
ON_LOAD: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "load_state_dict": (Keeper, lambda: planted(Keeper, "load_state_dict")),
    "load_state_dict with a tensor": (
        lambda: Keeper(torch.ones(2)),
        lambda: planted(lambda: Keeper(torch.zeros(2)), "load_state_dict"),
    ),
    "state_dict of the target": (lambda: Keeper(torch.ones(2)), lambda: planted(Keeper, "state_dict")),
    "check_stream": (Stream, lambda: planted(Stream, "check_stream")),
    "load_stream": (Stream, lambda: planted(Stream, "load_stream")),
    "choose_shards": (Shards, lambda: planted(Shards, "choose_shards")),
    "load_shards": (Shards, lambda: planted(Shards, "load_shards")),
    "load_state_dict of a PerRank": (
        lambda: reknit.PerRank(Keeper()),
        lambda: reknit.PerRank(planted(Keeper, "load_state_dict")),
    ),
}
AFTER_TENSORS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "set_extra_state": (Extra, lambda: planted(Extra, "set_extra_state")),
    "__setitem__": (lambda: {"n": 1}, lambda: Locked(n=0)),
    "a hook of a module": (lambda: nn.Linear(1, 1), lambda: hooked("register_load_state_dict_post_hook")),
    "a hook of an optimizer": (
        lambda: torch.optim.SGD([("w", nn.Parameter(torch.ones(1)))], lr=0.1),
        lambda: stepped("register_load_state_dict_post_hook"),
    ),
}
