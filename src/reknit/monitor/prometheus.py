"""Metrics for Prometheus, which reads them from this process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError, UsageError
from reknit.keywords import checked_call
from reknit.plugins.events import DroppedRecord, PhaseRecord, take_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.plugins.events import Record, StorageRecord

_MOST_NAMES = 200
"""Different values of one label: each has series of its own, and a user's phases have any names."""
_OTHER = "other"
_SECONDS = (0.001, 0.004, 0.016, 0.064, 0.25, 1, 4, 16, 64, 256, 1024)
_PHASE, _STORAGE = ("action", "phase", "process"), ("operation", "store")
_METRICS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "phase_seconds": ("histogram", "reknit_phase_seconds", "Time of phases", _PHASE),
    "phase_bytes": ("counter", "reknit_phase_bytes", "Bytes moved in phases", _PHASE),
    "failures": ("counter", "reknit_phase_failures", "Phases that failed", (*_PHASE, "outcome")),
    "ended": ("gauge", "reknit_last_success_timestamp_seconds", "When one last ended well", ("action",)),
    "step": ("gauge", "reknit_last_step", "Step that last ended well", ("action",)),
    "storage_seconds": ("histogram", "reknit_storage_seconds", "Latency of operations", _STORAGE),
    "storage_bytes": ("counter", "reknit_storage_bytes", "Bytes moved by operations", _STORAGE),
    "storage_errors": ("counter", "reknit_storage_errors", "Operations that failed", (*_STORAGE, "outcome")),
    "storage_retries": ("counter", "reknit_storage_retries", "Repetitions of operations", _STORAGE),
    "dropped": ("counter", "reknit_events_dropped", "Events that were lost", ()),
}


@checked_call
class Prometheus:
    """Keeps metrics of saves and loads in a registry of ``prometheus_client``, by default its global one.

    Start their server in the training process, as with ``prometheus_client.start_http_server(9464)``.  Steps
    and paths are not labels, because their number would grow without bound.  After 200 different phases,
    further ones are counted as "other".  Make one such sink, and pass it to all calls.
    Raises `MissingExtraError`, and `UsageError` for a second sink in the same registry.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError:
            raise MissingExtraError(
                "reknit.sinks.Prometheus needs the package prometheus-client",
                remedy="pip install 'reknit[monitor]'",
            ) from None
        kinds: dict[str, Any] = {
            "counter": Counter,
            "gauge": Gauge,
            "histogram": partial(Histogram, buckets=_SECONDS),
        }
        made: dict[str, Any] = {}
        place = REGISTRY if registry is None else registry
        try:
            for key, (kind, name, about, labels) in _METRICS.items():
                made[key] = kinds[kind](name, about, labels, registry=place)
        except ValueError as error:
            for metric in made.values():
                place.unregister(metric)
            raise UsageError(
                f"this registry has a Prometheus sink already: {error}",
                remedy="make one, and give it to all saves and loads",
            ) from error
        self._metrics = made
        self._names: dict[str, set[str]] = {}

    def take(self, records: Sequence[Record]) -> None:
        """Count records.  Raises `LostRecords` if some cannot be counted."""
        take_each(records, self._count)

    def _count(self, record: Record) -> None:
        if isinstance(record, PhaseRecord):
            self._phase(record)
        elif isinstance(record, DroppedRecord):
            self._metrics["dropped"].inc(record.num_dropped)
        else:
            self._operation(record)

    def _phase(self, record: PhaseRecord) -> None:
        found, labels = self._metrics, (record.action, self._known("phase", record.phase), record.process)
        found["phase_seconds"].labels(*labels).observe(record.seconds)
        found["phase_bytes"].labels(*labels).inc(record.nbytes)
        if record.outcome != "ok":
            found["failures"].labels(*labels, self._known("outcome", record.outcome)).inc()
        elif record.phase == record.action:
            found["ended"].labels(record.action).set(record.ended)
            if record.step is not None:
                found["step"].labels(record.action).set(record.step)

    def _known(self, label: str, name: str) -> str:
        """Return the value of a label: the name, or "other" after so many names."""
        names = self._names.setdefault(label, set())
        if name not in names and len(names) >= _MOST_NAMES:
            return _OTHER
        names.add(name)
        return name

    def _operation(self, record: StorageRecord) -> None:
        found, labels = self._metrics, (record.operation, self._known("store", record.store))
        found["storage_seconds"].labels(*labels).observe(record.seconds)
        found["storage_bytes"].labels(*labels).inc(record.nbytes)
        if record.retries:
            found["storage_retries"].labels(*labels).inc(record.retries)
        if record.outcome != "ok":
            found["storage_errors"].labels(*labels, self._known("outcome", record.outcome)).inc()
