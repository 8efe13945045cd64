"""Figures of each save and load for experiment trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError, UsageError
from reknit.keywords import checked_call
from reknit.monitor.opentelemetry import OpenOperations
from reknit.plugins.events import ACTION, PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.plugins.events import Record


class ScalarSink(ABC):
    """Sends the seconds of saves, loads and their phases to a tracker, on rank 0 only."""

    def __init__(self) -> None:
        self._operations = OpenOperations()

    @abstractmethod
    def log(self, figures: dict[str, float], step: int) -> None:
        """Send figures to the tracker."""

    def take(self, records: Sequence[Record]) -> None:
        """Send the figures of operations that have ended; the seconds and bytes of rank 0 stand for all."""
        mine = [record for record in records if isinstance(record, PhaseRecord) and record.rank == 0]
        for record in mine:
            if record.action == ACTION:
                self.log({f"reknit/{ACTION}/{record.phase}_s": record.seconds}, record.step or 0)
        for *phases, whole in self._operations.add([r for r in mine if r.action != ACTION]):
            head = f"reknit/{whole.action}"
            figures = {f"{head}/seconds": whole.seconds, f"{head}/failed": float(whole.outcome != "ok")}
            if whole.nbytes and whole.seconds:
                figures[f"{head}/GiB_per_s"] = whole.nbytes / 2**30 / whole.seconds
            for record in phases:
                name = f"{head}/{record.phase}_s"
                figures[name] = figures.get(name, 0.0) + record.seconds
            steps = [record.step for record in (whole, *phases) if record.step is not None]
            self.log(figures, steps[0] if steps else 0)


@checked_call
class TensorBoard(ScalarSink):
    """Adds scalars to `writer`, a ``SummaryWriter`` of TensorBoard or an object with its `add_scalar`."""

    def __init__(self, writer: Any) -> None:
        super().__init__()
        if not callable(getattr(writer, "add_scalar", None)):
            raise UsageError(
                f"a writer of TensorBoard has add_scalar, and {type(writer).__name__} has not",
                remedy="give torch.utils.tensorboard.SummaryWriter(folder)",
            )
        self._writer = writer

    def log(self, figures: dict[str, float], step: int) -> None:
        """Add scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)


@checked_call
class WandB(ScalarSink):
    """Logs to `run`, a run of Weights & Biases, such as ``wandb.init()`` returns.

    The figures have an axis of their own, ``reknit/step``, so they may come after later steps of training.
    """

    def __init__(self, run: Any) -> None:
        super().__init__()
        if not callable(getattr(run, "define_metric", None)):
            raise UsageError(
                f"a run of Weights & Biases is needed, not {type(run).__name__}", remedy="give wandb.init()"
            )
        run.define_metric("reknit/step")
        run.define_metric("reknit/*", step_metric="reknit/step")
        self._run = run

    def log(self, figures: dict[str, float], step: int) -> None:
        """Log the figures."""
        self._run.log({"reknit/step": step, **figures})


@checked_call
class MLflow(ScalarSink):
    """Logs to the run of MLflow with this id, by default the active run."""

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__()
        try:
            import mlflow
        except ImportError:
            raise MissingExtraError(
                "reknit.sinks.MLflow needs the package mlflow", remedy="pip install mlflow"
            ) from None
        if run_id is None:
            active = mlflow.active_run()
            if active is None:
                raise UsageError(
                    "no run of MLflow is active", remedy="call mlflow.start_run(), or give run_id="
                )
            run_id = active.info.run_id
        self._mlflow, self._run_id = mlflow, run_id

    def log(self, figures: dict[str, float], step: int) -> None:
        """Log the figures."""
        self._mlflow.log_metrics(figures, step=step, run_id=self._run_id)
