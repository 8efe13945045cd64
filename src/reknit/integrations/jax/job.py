"""The processes of a JAX job, and the key-value store through which they connect.

That is the store of JAX's coordination service.  JAX has no public interface to it: `jax.distributed` has
only `initialize`, `is_initialized` and `shutdown`.  This module uses JAX's internal client, and is the only
one that does.
"""

from __future__ import annotations

import sys
from typing import Any

from reknit.errors import CommError, DeadlineError, MissingExtraError, UsageError
from reknit.plugins.framework import TrainingJob

_SLICE_S = 1.0
"""The longest wait inside the client, during which Ctrl-C has no effect."""


class JaxStore:
    """The key-value store of the coordination service, under a prefix of reknit."""

    is_open = True

    def __init__(self, client: Any, prefix: str, master: str | None = None) -> None:
        """Use `coordination_store`; `client` is a `DistributedRuntimeClient`, `master` the service's host."""
        self._client, self._prefix, self.master = client, prefix, master

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, and replace an earlier one.  Raises `CommError` if the service is gone."""
        try:
            self._client.key_value_set_bytes(self._name(key), value, allow_overwrite=True)
        except RuntimeError as error:
            raise _lost(key, error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it.

        Raises `DeadlineError` if no value came, and `CommError` if the service is gone.
        """
        left_s = timeout_s
        while True:
            slice_s = min(_SLICE_S, left_s)
            left_s -= slice_s
            try:
                return self._look(self._name(key), slice_s)
            except RuntimeError as error:
                # JAX has one type for all errors of the service; the message begins with the kind.
                if not str(error).startswith(("NOT_FOUND", "DEADLINE_EXCEEDED")):
                    raise _lost(key, error) from error
                if left_s <= 0:
                    raise DeadlineError(
                        f"no process put {key!r} into JAX's store within {timeout_s:g} s",
                        remedy="check that all processes make the same call",
                    ) from error

    def _look(self, name: str, wait_s: float) -> bytes:
        if wait_s <= 0:
            return bytes(self._client.key_value_try_get_bytes(name))
        return bytes(self._client.blocking_key_value_get_bytes(name, max(1, int(wait_s * 1000))))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def coordination_store(prefix: str) -> JaxStore:
    """Return the store of this JAX job.

    Raises `MissingExtraError` without JAX, or for a JAX that is too old; `UsageError` before
    ``jax.distributed.initialize``.
    """
    try:
        from jax._src import distributed
    except ImportError as error:
        raise MissingExtraError(
            "at='jax://' needs JAX, which is not installed", remedy="pip install 'reknit[jax]'"
        ) from error
    client = distributed.global_state.client
    if client is None:
        raise UsageError(
            "the processes of this JAX job are not connected yet",
            remedy="call jax.distributed.initialize() first",
        )
    if not hasattr(client, "key_value_try_get_bytes"):
        raise MissingExtraError(
            f"JAX {sys.modules['jax'].__version__} has a store without a call that reknit needs",
            remedy="pip install --upgrade 'reknit[jax]', or meet in a folder",
        )
    return JaxStore(client, prefix, _host(distributed.global_state.coordinator_address))


class _ServiceGroup:
    """The group of all processes, for as long as they are connected to one service."""

    def __init__(self, client: Any) -> None:
        self.client = client


_meetings: list[_ServiceGroup] = []
"""The present group; another service (JAX was shut down and initialised again) has another group."""


def current_job() -> TrainingJob | None:
    """Return the job of all processes of JAX, or None before ``jax.distributed.initialize``."""
    if sys.modules.get("jax") is None:
        return None
    from jax._src import distributed

    state = distributed.global_state
    if getattr(state, "client", None) is None:
        _meetings.clear()
        return None
    if not _meetings or _meetings[0].client is not state.client:
        _meetings[:] = [_ServiceGroup(state.client)]
    store = coordination_store("reknit/all")
    return TrainingJob(
        state.process_id, state.num_processes, tuple(range(state.num_processes)), store, _meetings[0]
    )


def _host(address: str | None) -> str | None:
    return None if address is None else address.rpartition(":")[0].strip("[]") or None


def _lost(key: str, error: RuntimeError) -> CommError:
    return CommError(
        f"JAX's coordination service cannot be reached for {key!r}: {error}",
        remedy="the process that hosts it (usually process 0) has probably ended",
    )
