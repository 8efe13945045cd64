"""Where events can go: files, databases, and tools that watch.  For `SaveOptions(events=...)` and the like.

Make such an object once, in the training process, and pass it to all saves and loads.  Any object with a
method `take(records)` is a sink too.
"""

from reknit.errors import UsageError, shown
from reknit.keywords import checked_call
from reknit.locations import Sink
from reknit.monitor.duckdb import DuckDB
from reknit.monitor.opentelemetry import OpenTelemetry
from reknit.monitor.prometheus import Prometheus
from reknit.monitor.scalars import MLflow, TensorBoard, WandB
from reknit.plugins.events import JsonLines, flush_all

__all__ = [
    "DuckDB",
    "JsonLines",
    "MLflow",
    "OpenTelemetry",
    "Prometheus",
    "Sink",
    "TensorBoard",
    "WandB",
    "flush",
]


@checked_call
def flush(timeout_s: float = 10.0) -> bool:
    """Wait until all sinks of this process have received all earlier records, and return whether they have.

    Saves and loads do not wait for sinks.  Sinks, and files of `events`, receive records up to half a second
    later.  The end of the process waits for up to three seconds.  Raises `UsageError`.
    """
    given: object = timeout_s
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given >= 0:
        raise UsageError(f"timeout_s is a number of seconds, not {shown(timeout_s)}")
    return flush_all(timeout_s)
