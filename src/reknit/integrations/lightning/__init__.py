"""The callback `ReknitCheckpoint`, with which a Lightning trainer saves and loads.

`ReknitCheckpoint` takes the arguments of `ModelCheckpoint` about when to save, and keeps steps by the
policies of a `Checkpointer`.  It works with DDP, FSDP, ModelParallel and one device, for the packages
`lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch

from reknit import Checkpointer, steps
from reknit.errors import MissingExtraError, UsageError
from reknit.integrations.lightning import hooks
from reknit.integrations.lightning import step as lightning_folder
from reknit.integrations.lightning.step import FolderOfRun
from reknit.integrations.lightning.strategy import adopt
from reknit.locations import location_text
from reknit.plugins.trainer import ranked, refuse_living
from reknit.policies import best, latest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit import LoadReport, SavedStep
    from reknit.options import LoadOptions, SaveOptions
    from reknit.plugins.trainer import KeepRule, LaterSteps, OtherRun
    from reknit.policies import Policy


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> str:
    """Return the name of the Lightning package of this program: the one that it has imported, if one."""
    imported = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    installed = (name for name in _PACKAGES if find_spec(name.partition(".")[0]) is not None)
    if (name := next(iter(imported or installed), None)) is not None:
        return name
    raise MissingExtraError(
        "reknit.integrations.lightning needs the package lightning", remedy="pip install 'reknit[lightning]'"
    )


_PACKAGE = _package()
_Trainer: Any = import_module(_PACKAGE).Trainer
_ModelCheckpoint: Any = import_module(f"{_PACKAGE}.callbacks").ModelCheckpoint


class ReknitCheckpoint(_ModelCheckpoint):  # type: ignore[misc]
    """Saves the steps of a trainer below `dirpath`, in the background, and loads them.

    `arguments` are those of `ModelCheckpoint` that decide when to save and which steps to keep: `monitor`,
    `mode`, `save_top_k`, `save_last`, `save_on_exception`, `save_weights_only`, `every_n_train_steps`,
    `every_n_epochs`, `train_time_interval`, `save_on_train_epoch_end`, `verbose`.  `keep`, a policy of
    `reknit.policies`, replaces those about steps to keep.  The newest step always stays.  `wait`, `options`,
    `load_options`, `later_steps` and `other_run` are those of `Checkpointer`.

    To go on, ``trainer.fit(model, ckpt_path="last")`` loads the newest committed step.  Other values are
    ``"best"``, `dirpath`, which means the same as ``"last"``, and the path of any step.  If the folder has
    only a ``last.ckpt`` of Lightning, Lightning loads that.  A training that would begin at step 0 beside
    other checkpoints is refused, unless `resume` is false, or `later_steps` gives the fate of these.

    `load_report` is the report of the last load, or None.
    """

    def __init__(
        self,
        dirpath: str | PathLike[str],
        *,
        keep: KeepRule | None = None,
        wait: bool = False,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        later_steps: LaterSteps = "refuse",
        other_run: OtherRun = "refuse",
        resume: bool = True,
        **arguments: Any,
    ) -> None:
        for name in ("filename", "enable_version_counter", "auto_insert_metric_name"):
            if name in arguments:
                raise UsageError(
                    f"ReknitCheckpoint takes no {name}: a step is the folder step_<number>",
                    remedy="leave it out; the metrics are saved with each step, as `reknit ls` shows",
                )
        self._root = location_text(dirpath).rstrip("/")
        super().__init__(self._root, **arguments)
        self.dirpath = self._root  # as it is given: a relative path stays one
        self._ranking: Policy | None = None
        self._keep = keep if keep is not None else self._policy()
        self._call: dict[str, Any] = {
            "keep": self._keep,
            "wait": wait,
            "options": options,
            "load_options": load_options,
            "later_steps": later_steps,
            "other_run": other_run,
        }
        self._run: Checkpointer | None = None
        self._resume, self._is_due, self._waits_for_end = resume, False, False
        self.load_report: LoadReport | None = None

    def _policy(self) -> Policy | None:
        """Return the policy for the arguments of `ModelCheckpoint`; None keeps all steps."""
        if self.save_top_k == -1:
            return None
        if self.monitor is None or self.save_top_k == 0:
            return latest(1)
        return best(self.save_top_k, self.monitor, mode=self.mode) | latest(1)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the trainer's strategy, and open the run for training."""
        if not isinstance(trainer, _Trainer):
            raise UsageError(
                f"ReknitCheckpoint was made for {_PACKAGE}, and the trainer is of {type(trainer).__module__}",
                remedy="import that package before reknit.integrations.lightning",
            )
        adopt(trainer.strategy)
        if trainer.strategy.restore_checkpoint_after_setup:
            hooks.refuse_averages(trainer)
        self._run = Checkpointer(self._root, **self._call) if stage == "fit" else None
        folder = FolderOfRun(self._run, self._call["load_options"], self._note_report)
        trainer.strategy.runs = {**trainer.strategy.runs, self._root: folder}
        trainer.strategy.resumed_at = None

    def _note_report(self, report: LoadReport) -> None:
        self.load_report = report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a used folder, and set the random generators of a loaded checkpoint after loaders began."""
        super().on_train_start(trainer, pl_module)
        self._require_place(trainer)
        if not trainer.fast_dev_run:
            self._refuse_used(trainer)
        trainer.strategy.restore_random()
        hooks.begin_epoch(trainer)
        if trainer.ckpt_path is not None:  # a loaded step is not saved again
            self._last_global_step_saved = trainer.global_step

    @staticmethod
    def _require_place(trainer: Any) -> None:
        """Raise `UsageError` if the trainer has loaded a step, and then forgotten where it is."""
        step, trainer.strategy.resumed_at = trainer.strategy.resumed_at, None
        if step not in (None, trainer.global_step):
            raise UsageError(
                f"step {step} was loaded, and then a callback has restored another checkpoint: the trainer "
                f"would go on after step {trainer.global_step}",
                remedy="leave BatchSizeFinder and LearningRateFinder out of a trainer that resumes",
            )

    def _refuse_used(self, trainer: Any) -> None:
        """Raise an error on all ranks if this training would begin beside other work in its folder."""
        error, is_new = None, trainer.ckpt_path is None and trainer.global_step == 0
        if trainer.is_global_zero and not trainer.strategy.goes_on_in(self._root):
            later = partial(lightning_folder.refuse_later, self._root, trainer.global_step)
            others = partial(lightning_folder.refuse_others, self._root, self._fs)
            living = partial(refuse_living, self._root)
            error = lightning_folder.first_error(
                *[later] * (self._call["later_steps"] == "refuse"),
                *[others] * (is_new and self._resume),
                *[living] * (self._call["other_run"] == "refuse"),
            )
        if (error := trainer.strategy.broadcast(error)) is not None:
            raise error

    def on_train_batch_end(self, trainer: Any, *others: Any, **more: Any) -> None:
        """Save if it is time; after the last batch of an epoch, its end comes first.

        Lightning does not repeat the end of an epoch, nor begin the next, if it resumes between.
        """
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self._waits_for_end = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        try:
            super().on_train_batch_end(trainer, *others, **more)
        finally:
            self._waits_for_end = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save at the end of an epoch if it is time, or was after its last batch."""
        super().on_train_epoch_end(trainer, pl_module)
        is_due, self._is_due = self._is_due, False
        if is_due:
            self._save_step(trainer, self._monitor_candidates(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if that is wanted; agents finish the saves that are staged."""
        super().on_exception(trainer, pl_module, exception)
        self._leave(trainer, exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for all saves after training."""
        super().teardown(trainer, pl_module, stage)
        self._leave(trainer, None)

    def _leave(self, trainer: Any, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if (runs := getattr(trainer.strategy, "runs", None)) is not None:  # another callback failed before
            trainer.strategy.runs = {root: other for root, other in runs.items() if root != self._root}
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the steps and their metrics are the state."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take nothing."""

    @property
    def best_model_path(self) -> str:
        """The path of the best committed step by `monitor`, else of the newest, or an empty text."""
        return self._step_path(self._ranked() if self.monitor is not None else self._committed()[::-1])

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        pass

    @property
    def best_model_score(self) -> Any:
        """The metric of the best committed step as a tensor, or None."""
        return next(iter(self.best_k_models.values()), None)

    @best_model_score.setter
    def best_model_score(self, score: Any) -> None:
        pass

    @property
    def best_k_models(self) -> dict[str, Any]:
        """The metrics of the committed steps by their paths, the best first."""
        ranked_steps = self._ranked() if self.monitor is not None else []
        return {each.path: torch.tensor((each.metrics or {})[self.monitor]) for each in ranked_steps}

    @best_k_models.setter
    def best_k_models(self, models: Any) -> None:
        pass

    @property
    def last_model_path(self) -> str:
        """The path of the newest committed step, or an empty text."""
        return self._step_path(self._committed()[::-1])

    @last_model_path.setter
    def last_model_path(self, path: str) -> None:
        pass

    def _committed(self) -> list[SavedStep]:
        return [each for each in steps(self._root) if each.problem is None and each.step is not None]

    def _ranked(self) -> list[SavedStep]:
        return ranked(best(1, self.monitor, mode=self.mode), self._committed())

    @staticmethod
    def _step_path(found: list[SavedStep]) -> str:
        return found[0].path if found else ""

    # The methods by which `ModelCheckpoint` saves and finds its files; `private_hooks` lists them.

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self.save_top_k != 0:
            self._save_step(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self.save_last:
            self._save_step(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self._save_step(trainer, self._monitor_candidates(trainer))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        found = lightning_folder.folder_contents(self._root)
        if found.steps:
            return {self._root}
        if files := super()._find_last_checkpoints(trainer):
            return files  # type: ignore[no-any-return]
        if self._resume:
            lightning_folder.refuse_others(self._root, self._fs)
        return {self._root} if found.is_opened else set()  # an agent may still commit a step

    def _save_step(self, trainer: Any, candidates: Mapping[str, Any]) -> None:
        step, run = trainer.global_step, self._run
        if run is None or self._last_global_step_saved == step:
            return
        if self._waits_for_end:
            self._is_due = True
            return
        scalars = {name: torch.as_tensor(value) for name, value in candidates.items()}
        metrics = {name: float(value) for name, value in scalars.items() if value.numel() == 1}

        def save(state: dict[str, Any]) -> None:
            run.save(step, state, metrics, force=True)

        with trainer.strategy.saving(save):
            trainer.save_checkpoint(self._root, self.save_weights_only)
        self._last_global_step_saved, self._last_checkpoint_saved = step, self._root
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))
