"""What does the integration learn while a Trainer of transformers trains?  Its loader, metrics and steps."""

from __future__ import annotations

from numbers import Real
from typing import Any

from transformers import TrainerCallback


class TrainerFollower(TrainerCallback):
    """Follows a training for its trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Follow the loader of the training."""
        if self._trainer._reknit_run is not None:
            self._trainer._reknit_follow(others["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note that an epoch begins."""
        if self._trainer._reknit_data is not None:
            self._trainer._reknit_data.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Add a save, or the end, if the policy of the run decides so."""
        run = self._trainer._reknit_run
        if run is not None and self._trainer._reknit_decides:
            control.should_save = run.should_save(state.global_step) or control.should_save
            control.should_training_stop = run.preempted is not None or control.should_training_stop
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        """Note the metrics of an evaluation."""
        step, before = self._trainer._reknit_scores
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, Real)}
        earlier = before if step == state.global_step else {}  # a step may have several evaluations
        self._trainer._reknit_scores = state.global_step, {**earlier, **numbers}
