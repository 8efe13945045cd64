"""The steps that stay under a limit: the newest, and the best, as in the Trainer of transformers."""

from __future__ import annotations

from types import SimpleNamespace

from reknit.integrations.trainers import StepLimit
from reknit.types.manifest import SavedStep


def steps(*losses: float | None) -> list[SavedStep]:
    return [
        SavedStep(number, f"step_{number}", metrics={"eval_loss": loss})
        for number, loss in enumerate(losses, 1)
    ]


def test_the_best_step_takes_the_place_of_an_old_one_and_without_a_metric_only_the_newest_stay() -> None:
    for count, greater, losses, kept in [
        (2, False, (3.0, 2.0, 1.0), {2, 3}),
        (2, False, (1.0, 2.0, 3.0), {1, 3}),
        (1, False, (1.0, 2.0, 3.0), {1, 3}),
        (3, False, (1.0, 2.0, 3.0, 4.0), {1, 3, 4}),
        (2, True, (1.0, 3.0, 2.0, 1.0), {2, 4}),
        (2, False, (1.0, 1.0, 2.0, 2.0), {1, 4}),  # of equals the first
        (2, False, (None, None, None), {2, 3}),
        (5, False, (1.0, 2.0), {1, 2}),
    ]:
        limit = StepLimit(count, "eval_loss", greater_is_better=greater)
        assert limit.kept(steps(*losses), 0.0) == kept, losses
    assert StepLimit(2).kept(steps(1.0, 2.0, 3.0), 0.0) == {2, 3}


def test_it_follows_the_arguments_of_a_trainer() -> None:
    for limit, metric, expected in [
        (None, "loss", None),
        (0, None, None),
        (2, None, StepLimit(2)),
        (3, "loss", StepLimit(3, "eval_loss")),
        (3, "eval_accuracy", StepLimit(3, "eval_accuracy", greater_is_better=True)),
    ]:
        args = SimpleNamespace(
            save_total_limit=limit, metric_for_best_model=metric, greater_is_better=metric == "eval_accuracy"
        )
        assert StepLimit.of(args) == expected
