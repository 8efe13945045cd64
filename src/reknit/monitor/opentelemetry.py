"""Spans of OpenTelemetry: one for each save or load, and below it one for each phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError
from reknit.keywords import checked_call
from reknit.plugins.events import ACTION, PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.plugins.events import Record


_MOST_OPEN = 64
_MOST_PHASES = 1_000


class OpenOperations:
    """The phases of operations that have not ended; if there are too many, the oldest is forgotten."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int | None, int], list[PhaseRecord]] = {}

    def add(self, records: Sequence[Record]) -> Iterator[list[PhaseRecord]]:
        """Add records, and yield the phases of each operation that ends, with the phase of the whole last."""
        for record in records:
            if not isinstance(record, PhaseRecord):
                continue
            key = (record.action, record.path, record.step, record.rank)
            phases = self._open.setdefault(key, [])
            if len(phases) < _MOST_PHASES or record.phase == record.action:
                phases.append(record)
            if record.phase == record.action and record.process == "trainer":
                yield self._open.pop(key)
            elif len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]


@checked_call
class OpenTelemetry:
    """Makes spans with a tracer provider, by default the one that the program has set.

    The span of a save is made when the save has ended, with the spans of its phases below it, nested as the
    phases were.  Phases of your own, see `reknit.phase`, have spans of their own.  Only the API of
    OpenTelemetry is used: you choose SDK and exporter.  Raises `MissingExtraError`.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise MissingExtraError(
                "reknit.sinks.OpenTelemetry needs the package opentelemetry-api",
                remedy="pip install 'reknit[monitor]'",
            ) from None
        self._trace = trace
        self._tracer = trace.get_tracer("reknit", tracer_provider=tracer_provider)
        self._operations = OpenOperations()

    def take(self, records: Sequence[Record]) -> None:
        """Make the spans of the operations that have ended."""
        own = [record for record in records if isinstance(record, PhaseRecord) and record.action == ACTION]
        for record in own:
            self._span(record, None).end(_ns(record.ended))
        others = [
            record for record in records if not isinstance(record, PhaseRecord) or record.action != ACTION
        ]
        for *phases, whole in self._operations.add(others):
            root = self._span(whole, None)
            for process in ("trainer", "agent"):
                self._below(root, [record for record in phases if record.process == process])
            root.end(_ns(whole.ended))

    def _below(self, root: Any, phases: list[PhaseRecord]) -> None:
        """Make the spans of phases of one process; a phase inside another phase has its span below it."""
        above: list[tuple[PhaseRecord, Any]] = []
        for record in sorted(phases, key=lambda record: (record.started, -record.ended)):
            while above and above[-1][0].ended < record.ended:
                above.pop()
            span = self._span(record, above[-1][1] if above else root)
            span.end(_ns(record.ended))
            above.append((record, span))

    def _span(self, record: PhaseRecord, above: Any) -> Any:
        """Start the span of a phase, below the span `above`."""
        facts: dict[str, Any] = {
            "reknit.action": record.action,
            "reknit.path": record.path,
            "reknit.rank": record.rank,
            "reknit.nbytes": record.nbytes,
            "reknit.seconds": record.seconds,
            "reknit.process": record.process,
            "host.name": record.host,
            **({} if record.step is None else {"reknit.step": record.step}),
            **{f"reknit.coordinate.{axis}": number for axis, number in record.coordinate.items()},
        }
        context = None if above is None else self._trace.set_span_in_context(above)
        span = self._tracer.start_span(
            record.phase, context, attributes=facts, start_time=_ns(record.started)
        )
        if record.outcome != "ok":
            text = f"{record.outcome}: {record.detail}" if record.detail else record.outcome
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text))
        return span


def _ns(seconds: float) -> int:
    return round(seconds * 1e6) * 1000  # a date in seconds is not more precise
