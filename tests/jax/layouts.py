"""The functions of the tests of layouts; every process of a job calls them."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reknit
from reknit.dataloader import SourceLoader
from reknit.errors import StateError, UsageError
from reknit.frameworks import registry
from reknit.frameworks.per_rank import PerRank
from reknit.integrations.jax.filling import same as same_arrays
from reknit.types.manifest import Catalog
from tests.jax import training

if TYPE_CHECKING:
    from collections.abc import Iterator


def train_and_save(folder: str, rows: int, columns: int) -> list[float]:
    """Train two steps, save, and go on; return the losses after the save."""
    state = training.fresh(training.mesh(rows, columns), 1)
    training.train(state, 2)
    reknit.save(folder, state, step=2)
    training.keep_truth(state, f"{folder}.npz")
    return training.train(state, 3)


def load_and_save(folder: str, truth: str, rows: int, columns: int, into: str | None) -> dict[str, Any]:
    """Load into live and abstract arrays, save again, go on, and return the differences."""
    on = training.mesh(rows, columns)
    live = training.fresh(on, 2)
    shape: Any = jax.tree.structure(live)
    reknit.load(folder, live)
    wrong = training.differing(live, truth)
    state = training.abstract(live) | {"step": 0}
    reknit.load(folder, state)
    wrong += training.differing(state, truth)
    wrong += [] if shape == jax.tree.structure(live) and shape == jax.tree.structure(state) else ["structure"]
    if into:
        reknit.save(into, state, step=2, wait=rows != 2).result()  # by agents, where two processes do
    wrong += [] if state["step"] == 2 else ["step"]
    return {"wrong": wrong, "losses": training.train(state, 3)}


def save_odd_meshes(folder: str) -> None:
    """Save and load arrays whose meshes lack some devices, or have them in another order."""
    state = _odd()
    held = registry.collect(state, jax.process_index(), 2)
    for shard in held.shards:
        name = (shard.item, shard.fqn)
        if name == ("odd", "crossed") and shard.box.offsets[0] == 0:
            assert shard.replicas == (0,)
        elif name == ("odd", "crossed") and shard.box.offsets[0] == 2:
            assert shard.replicas == (0, 1)
        elif name == ("odd", "local"):
            assert shard.replicas is None
    ours = {shard.fqn for shard in held.shards}
    assert ("second" in ours) == (jax.process_index() == 1)
    reknit.save(folder, state)
    for target in (_odd(0), training.abstract(_odd(0))):
        reknit.load(folder, target)
        for name, array in target["odd"].items():
            want = state["odd"][name]
            assert array.sharding == want.sharding
            pairs = zip(array.addressable_shards, want.addressable_shards, strict=True)
            assert all(np.array_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs), name
    with reknit.open(folder) as checkpoint:
        assert checkpoint.read("odd", "second").tolist() == [0, 1, 2, 3, 4, 5]


def _odd(times: int = 1) -> dict[str, Any]:
    devices = np.array(jax.devices())
    here = [device for device in devices if device.process_index == jax.process_index()]
    second = Mesh(devices[3:], ("x",))  # those of the second process alone
    crossed = Mesh(devices.reshape(3, 2), ("x", "y"))  # its middle row is on both processes

    def put(on: Mesh, *spec: Any) -> Any:
        values = np.arange(6, dtype=np.float32) * times
        return jax.make_array_from_callback(
            (6,), NamedSharding(on, P(*spec)), lambda index: values[index], dtype=jnp.float32
        )

    return {
        "odd": {
            "second": put(second, "x"),
            "crossed": put(crossed, "x"),
            "reversed": put(Mesh(devices[::-1], ("x",)), "x"),
            "local": jax.device_put(np.float32(3 * times), here[1]),
            "each": jnp.ones(3) * times,
        }
    }


def look_without_others(rows: int, columns: int) -> int:
    """Collect and deliver without the other processes, and return the number of shards."""
    state = {"params": training.parameters(training.mesh(rows, columns), 1)}
    held = registry.collect(state, jax.process_index(), jax.process_count())
    specs: dict[str, Any] = {item: {} for item in state}
    for shard in held.shards:
        specs[shard.item][shard.fqn] = shard.spec
    blobs: dict[str, Any] = {item: {} for item in state}
    for blob in held.blobs:
        blobs[blob.item][blob.fqn] = blob.value
    catalog = Catalog(tuple(state), specs, blobs, {}, lambda *_: {})
    want = registry.wanted(state, catalog, jax.process_index(), jax.process_count())
    for shard in want.shards:
        shard.data[...] = 0
    want.deliver()
    assert not want.missing
    assert not want.mismatched
    assert {shard.replicas for shard in held.shards if shard.fqn == "up/b"} == {(0, 1)}
    return len(held.shards)


def load_under_a_mesh(folder: str) -> list[str]:
    """Load arrays of a mesh, set or not, of all processes; return the names of arrays that differ."""
    wrong: list[str] = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(kind,))
        for is_set in (False, True):
            path = f"{folder}/{kind}-{is_set}"
            with jax.set_mesh(mesh) if is_set else nullcontext():
                want = _on_all_devices(mesh)
                reknit.save(path, {"w": want, "own": PerRank({"key": want["key"], "rep": [want["rep"]]})})
                state: dict[str, Any] = {
                    "w": dict(want),
                    "own": PerRank({"key": want["key"], "rep": [want["rep"]]}),
                }
                reknit.load(path, state)
                own = state["own"].value
                pairs = [(name, array, want[name]) for name, array in state["w"].items()]
                pairs += [("own key", own["key"], want["key"]), ("own rep", own["rep"][0], want["rep"])]
                wrong += [f"{path} {name}" for name, *two in pairs if not _same_everywhere(*two)]
                assert all(array is not other for _, array, other in pairs)
    return wrong


def _on_all_devices(mesh: Any) -> dict[str, Any]:
    rep, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    count = mesh.size
    return {
        "key": jax.jit(lambda: jax.random.key(7), out_shardings=rep)(),
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(7), count), out_shardings=cut)(),
        "rep": jax.jit(lambda: jnp.arange(8.0), out_shardings=rep)(),
        "cut": jax.jit(lambda: jnp.arange(8.0 * count), out_shardings=cut)(),
        "number": jax.device_put(1.5),
        "own key": jax.random.wrap_key_data(jax.device_put(np.arange(2, dtype=np.uint32))),
    }


def _same_everywhere(array: Any, want: Any) -> bool:
    alike = (array.aval, array.sharding, array.committed) == (want.aval, want.sharding, want.committed)
    return alike and same_arrays(array, want)


def read_without_a_place() -> list[int]:
    """Return the numbers that this process reads."""
    return list(SourceLoader(_Source, 5))


class _Source:
    """A source of one number."""

    def __init__(self, number: int) -> None:
        self.left = [number]

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


def refuse_on_one(folder: str) -> str:
    """Save a state that cannot be saved on one process, and return the error of this process."""
    state = {"w": jnp.ones(3)}
    if jax.process_index() == 1:
        state["w"].delete()
    try:
        reknit.save(folder, state)
    except StateError as error:
        return str(error)
    return "saved"


def beside_torch(folder: str) -> list[str]:
    """Save and load in jobs of torch beside that of JAX, and return the errors if the jobs do not match."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from tests.torchrun import pieces

    rank, reported = jax.process_index(), []
    w = training.parameters(training.mesh(2, 2), 1)["emb"]
    for number, (ours, size) in enumerate([(0, 1), (1 - rank, 2)]):
        with _torch_job(f"{folder}-store-{f'of-{rank}' if size == 1 else number}", ours, size):
            try:
                reknit.save(f"{folder}/{number}", {"model": {"w": w}})
            except UsageError as error:
                reported.append(str(error))
    with _torch_job(f"{folder}-store", rank, 2):
        devices = init_device_mesh("cpu", (2,))
        values = torch.arange(96.0).reshape(12, 8)
        cut = distribute_tensor(values, devices, [Shard(0)])
        reknit.save(f"{folder}/both", {"torch": {"w": cut}, "jax": {"w": w}})
        state: dict[str, Any] = {
            "torch": {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)},
            "jax": {"w": distribute_tensor(torch.zeros(12, 8), devices, [Shard(1)])},
        }
        reknit.load(f"{folder}/both", state)
        assert isinstance(state["jax"]["w"], DTensor)
        for shard in state["torch"]["w"].addressable_shards:
            assert np.array_equal(shard.data, values.numpy()[shard.index])
        whole = pieces.whole(state["jax"]["w"]).numpy()
        for shard in w.addressable_shards:
            assert np.array_equal(shard.data, whole[shard.index])
        dist.barrier()
    return reported


@contextmanager
def _torch_job(store: str, rank: int, size: int) -> Iterator[None]:
    import torch.distributed as dist

    file = f"file://{store}"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=size)
    try:
        if size > 1:
            dist.barrier()  # else a rank could leave before another has joined
        yield
    finally:
        dist.destroy_process_group()
