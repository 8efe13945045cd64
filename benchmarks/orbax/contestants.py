"""reknit and Orbax in its several modes, with the same calls."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

Arrays = dict[str, Any]


class Mode(NamedTuple):
    """A contestant: reknit (`share`: reads are shared), or Orbax with these options.

    `chunk_nbytes` cuts shards into smaller chunks when they are saved.  `broadcast` reads one replica only.
    """

    name: str
    reknit: bool = False
    share: str = "auto"
    ocdbt: bool = True
    replica_parallel: bool = True
    chunk_nbytes: int | None = None
    broadcast: bool = False


class Contestant:
    """One mode; `save` returns when training may go on; its result, a function, waits for the end."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._orbax = None if mode.reknit else _orbax(mode)

    def save(self, path: str, arrays: Arrays) -> Callable[[], object]:
        """Begin to save."""
        if self._orbax is None:
            import reknit

            return reknit.save(path, {"model": arrays}, wait=False).result
        import jax
        import orbax.checkpoint as ocp

        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=self.mode.chunk_nbytes), arrays)
        self._orbax.save(path, args=ocp.args.PyTreeSave(arrays, save_args=chunks))
        waiting: Callable[[], object] = self._orbax.wait_until_finished
        return waiting

    def load(self, path: str, arrays: Arrays) -> Arrays:
        """Return the saved arrays in the shardings of `arrays`."""
        import jax

        if self._orbax is None:
            import reknit

            options = reknit.LoadOptions(share=self.mode.share)  # type: ignore[arg-type]
            state = {"model": dict(arrays)}
            reknit.load(path, state, options=options)
            loaded: Arrays = state["model"]
        else:
            import orbax.checkpoint as ocp

            kind = (
                ocp.type_handlers.SingleReplicaArrayRestoreArgs
                if self.mode.broadcast
                else ocp.ArrayRestoreArgs
            )
            restored = {
                name: kind(sharding=each.sharding, global_shape=each.shape, dtype=each.dtype)
                for name, each in arrays.items()
            }
            loaded = self._orbax.restore(
                path, args=ocp.args.PyTreeRestore(item=arrays, restore_args=restored)
            )
        jax.block_until_ready(loaded)
        return loaded

    def close(self) -> None:
        """End its threads and processes."""
        if self._orbax is None:
            import reknit

            reknit.close()
        else:
            self._orbax.close()


def _orbax(mode: Mode) -> Any:
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    if mode.broadcast:
        handler: Any = type_handlers.SingleReplicaArrayHandler(use_replica_parallel=mode.replica_parallel)
    else:
        handler = type_handlers.ArrayHandler(use_replica_parallel=mode.replica_parallel)
    registry = type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=mode.ocdbt, type_handler_registry=registry)
    )
