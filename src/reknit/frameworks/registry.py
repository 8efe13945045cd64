"""The adapters of all frameworks, and the two passes that use them: `collect` and `wanted`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from reknit import plugins
from reknit.errors import StateError
from reknit.frameworks import custom
from reknit.frameworks.per_rank import PerRankAdapter
from reknit.frameworks.plain import ContainerAdapter, NumpyArrays, TensorAdapter, ValueAdapter, setter
from reknit.frameworks.stateful import StatefulAdapter
from reknit.frameworks.walk.walk import OnMatch, Place, World
from reknit.keywords import is_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from reknit.frameworks.walk import Adapter
    from reknit.frameworks.walk.walk import Arrays
    from reknit.frameworks.walk.walk_cache import TensorSigner
    from reknit.types.manifest import Catalog
    from reknit.types.shard import Holdings
    from reknit.types.wanted import Wanted


def collect(
    state: Mapping[str, Any], rank: int, size: int, *, ranks: Sequence[int] | None = None
) -> Holdings:
    """Return this rank's shards and values of a state.  Local, sends no messages, changes nothing.

    `rank` and `size` count the ranks that save; `ranks` are their numbers in the whole job (None: the same).
    Raises `StateError`, with the key path, for a value that cannot be saved.
    """
    from reknit.frameworks.walk.save_walk import Saving  # a load needs none of it

    known = _known()
    make = partial(Saving, _checked(state), _world(rank, size, ranks), *known.for_walks)
    # Frameworks of users, and extensions for torch's objects, may store any of these objects in another way.
    if custom.adapters() or known.extensions or not known.signers:
        return make().walk()
    from reknit.frameworks.walk.walk_cache import walk_cache

    return walk_cache.collect(make, known.signers[0])


def wanted(
    state: Mapping[str, Any],
    catalog: Catalog,
    rank: int,
    size: int,
    *,
    ranks: Sequence[int] | None = None,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> Wanted:
    """Return this rank's requests to a checkpoint.  Local, sends no messages.

    Modules in `beside` are not loaded; they name the parameters of the optimizers in `state`.
    No object changes before `deliver_early`.  Nothing else changes before memory that is not for objects is
    filled.  Raises `StateError`, with the key path, for a value that cannot be filled.
    """
    from reknit.frameworks.walk.load_walk import Loading  # a save needs none of it
    from reknit.frameworks.walk.requests import RankCatalog

    known, world = _known(), _world(rank, size, ranks)
    signer = None if custom.adapters() or not known.signers else known.signers[0]
    terms = catalog.terms
    more: dict[str, Any] = {} if signer is None else {"signer": signer, "kinds": signer.kinds}
    more["idle"] = tuple(dict.fromkeys((*terms.only, *terms.resizable, *terms.watched)))
    more |= {"catalog": catalog, "saved": RankCatalog(catalog, world), "beside": beside}
    loading = Loading(_checked(state), world, *known.for_walks, **more)
    with _lasting_tensors():
        for item, value in state.items():
            loading.visit(value, Place(item), setter(state, item))
        found = loading.wanted()

    lasting = _lasting_tensors
    return replace(found, deliver_early=lasting()(found.deliver_early), deliver=lasting()(found.deliver))


@contextmanager
def _lasting_tensors() -> Iterator[None]:
    """Let torch make tensors that can be trained, also inside `torch.inference_mode`."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _checked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateError(
            f"the state is a {type(state).__name__}", remedy='pass a dict, such as {"model": model}'
        )
    for item in state:
        if not is_text(item):
            raise StateError(
                f"the state has the item {item!r}", remedy="items have names: strings, not empty"
            )
    return state


def _world(rank: int, size: int, ranks: Sequence[int] | None) -> World:
    return World(rank, size, tuple(range(size)) if ranks is None else tuple(ranks))


class _Frameworks(Struct, frozen=True):
    """The adapters in the order of use, libraries with tensors, extensions, and readers of many tensors."""

    adapters: tuple[Adapter, ...]
    libraries: tuple[Arrays, ...]
    extensions: tuple[Any, ...]
    signers: tuple[TensorSigner, ...]

    @property
    def for_walks(self) -> tuple[Any, Any, Any]:
        """The part that walks take."""
        return self.adapters, self.libraries, self.extensions


def _known() -> _Frameworks:
    """Return the adapters, and more, of the frameworks that are imported."""
    found, of_frameworks = _loaded()
    libraries = (*_all(found, "libraries"), NumpyArrays())
    adapters: tuple[Adapter, ...] = (
        PerRankAdapter(),
        *custom.adapters(),
        *of_frameworks,
        StatefulAdapter(),
        TensorAdapter(libraries),
        ContainerAdapter(),
        ValueAdapter(),
    )
    return _Frameworks(adapters, libraries, _all(found, "extensions"), _all(found, "signers"))


def _loaded() -> tuple[list[ModuleType], list[Any]]:
    """Return the modules of the frameworks that look at every value, and the adapters of all frameworks.

    A framework that is not imported has no objects in any state.
    """
    modules: list[ModuleType] = []
    adapters: list[Any] = []
    for row in plugins.FRAMEWORKS.values():
        if isinstance(row, str) or (
            row.needs and sys.modules.get(row.needs) is None
        ):  # None blocks an import
            continue
        if row.classes or row.methods:
            adapters.append(OnMatch(row))
        else:
            modules.append(import_module(row.module))
            adapters += getattr(modules[-1], "adapters", tuple)()
    return modules, adapters


def _all(modules: list[ModuleType], name: str) -> tuple[Any, ...]:
    """Return the results of the functions of this name in some modules, in one tuple."""
    return tuple(one for module in modules for one in getattr(module, name, tuple)())
