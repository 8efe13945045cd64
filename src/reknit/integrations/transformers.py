"""The base class `ReknitTrainer`, with which scripts for transformers' Trainer save and resume.

`ReknitTrainer` stands in for `Trainer`, and `ReknitTrainerMixin` does the same for trainers that inherit
from it, such as those of TRL: ``class MyTrainer(ReknitTrainerMixin, SFTTrainer)``.  The steps of a run are
checkpoints of a `Checkpointer` below ``OUTPUT_DIR/_reknit``.

transformers skips the first batches of the epoch, but draws the order of the rest from other random states
than the interrupted run.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from functools import partial
from numbers import Real
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import reknit
from reknit import RngState
from reknit.errors import MissingExtraError, StateError, UsageError, VersionError
from reknit.integrations import trainers
from reknit.plugins.trainer import Kept, acting, step_name

try:
    import accelerate  # noqa: F401 (the loaders below import it)
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError:
    raise MissingExtraError(
        "reknit.integrations.transformers needs the packages transformers and accelerate",
        remedy="pip install 'reknit[transformers]'",
    ) from None

from reknit import Checkpointer
from reknit.integrations.loaders import CountedLoader, EpochRandom, warn_of_order
from reknit.integrations.private_hooks import require_hooks
from reknit.integrations.trainers import StepLimit
from reknit.locations import location_text
from reknit.options import SaveOptions
from reknit.plugins.trainer import UNSOUND, ask_root, below, refuse_living, say_resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from reknit import LoadReport


logger = logging.getLogger("reknit")


class TrainerLoader:
    """The loader of one training: one that Accelerate has prepared, or a plain one of torch."""

    def __init__(self, loader: Any, accelerator: Any) -> None:
        self._loader = loader
        self._position: Any = None
        if hasattr(loader, "base_dataloader"):
            loader.base_dataloader = counted = CountedLoader(
                loader, accelerator.num_processes, split_batches=accelerator.split_batches, ordered=False
            )
            self._position = counted.position
        self._random = EpochRandom(reads_ahead=False) if self._position is None else self._position.random
        self._given: Any = None
        self._batches: Any = None
        self._skipped, self._epoch = 0, 0
        self._restore: Callable[[], None] | None = None
        self.has_continued = False
        """Whether an epoch was continued, with the random generators set."""

    def position(self) -> dict[str, Any] | None:
        """Return the position for any number of processes, None for a plain loader."""
        return None if self._position is None else self._position.state_dict()

    def random_state(self) -> dict[str, Any] | None:
        """Return the random states of this process for the rest of the epoch."""
        if self._position is not None:
            states: dict[str, Any] | None = self._position.random_state()
            return states
        return self._random.state_dict(self._loader)

    def begin(self) -> None:
        """Note that an epoch begins now."""
        if self._position is None and not self._random.is_loaded:
            self._random.begin(self._loader)

    def resume(
        self,
        position: Mapping[str, Any] | None,
        states: dict[str, Any] | None,
        skipped: tuple[int, int],
        restore: Callable[[], None],
    ) -> None:
        """Continue at a saved position, where transformers has `skipped` epochs and batches.

        `restore` sets the random generators of the process as they were at the step.
        """
        self._epoch, self._skipped = skipped
        if self._position is not None and position is not None:
            self._epoch, self._skipped = self._agreed(position, *skipped)
            self._position.load_state_dict({**position, "epoch": self._epoch}, self._skipped)
        if not self._skipped:
            if self._position is not None:
                self._random.load_state_dict(states)
            return
        if states is not None or (self._position is not None and position is not None):
            self._random.load_state_dict(states)
            self._restore = restore
        else:
            warn_of_order(self._loader)

    def batches(self, given: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of an epoch in the place of the iterator that transformers has made for it."""
        if given is not self._given:
            self._given = self._batches = given
            restore, self._restore = self._restore, None
            if restore is not None:
                self.has_continued = True
                restore()
                self._batches = self._continued()
        batches: Iterator[Any] = self._batches
        return batches

    def _continued(self) -> Iterator[Any]:
        if self._position is None:
            return self._random.batches(self._loader, self._skipped)
        self._loader.set_epoch(self._epoch)
        return iter(self._loader)

    def _agreed(self, position: Mapping[str, Any], epochs: int, batches: int) -> tuple[int, int]:
        """Return the epochs and batches to skip: the saved ones for a loader without a length.

        transformers computes its own from that length.
        """
        try:
            saved = position["epoch"], self._position.steps(position)
        except StateError:
            saved = None
        if saved == (epochs, batches):
            return saved
        try:
            len(self._loader)
        except TypeError:  # of a data set without a length
            if saved is not None:
                return self._unsized(saved, epochs)
        logger.warning(
            "the step was saved after %d batches of epoch %d, and transformers continues after %d of epoch "
            "%d here: some samples come twice, or never.  Keep the number of samples of a step to "
            "prevent that",
            position["batches"] if saved is None else saved[1],
            position["epoch"],
            batches,
            epochs,
        )
        return epochs, batches

    @staticmethod
    def _unsized(saved: tuple[int, int], epochs: int) -> tuple[int, int]:
        if saved[0] != epochs:
            logger.warning(
                "the data set has no length, so transformers counts its epochs from %d again after this one, "
                "which is number %d; an order that depends on the number of the epoch differs from then on",
                epochs + 1,
                saved[0],
            )
        return saved


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


FOLDER = "_reknit"
"""The folder of the steps in `output_dir`; pushes to the hub leave out names that begin like this."""

_AnyTrainer: Any = object
"""The trainer from which the mixin inherits in the end."""


def get_last_checkpoint(output_dir: str | PathLike[str]) -> str | None:
    """Return the path of the newest committed step of a run below its `output_dir`, or None.

    Use it in the place of the function of this name in transformers, which may return a folder that is not
    complete.
    """
    root = os.path.join(location_text(output_dir), FOLDER)
    return reknit.latest(root) if os.path.isdir(root) else None


class ReknitTrainerMixin(_AnyTrainer):  # type: ignore[misc]
    """Lets a trainer of transformers save in the background, and resume exactly from a committed step.

    ``train(resume_from_checkpoint=True)`` continues after the newest committed step, or after a newer
    checkpoint of transformers itself; without both it begins anew.  The path of one of them is a place to
    resume from, too.  Without `resume_from_checkpoint`, a training that saves is refused beside them.

    `save_strategy`, `save_total_limit`, `metric_for_best_model` and `load_best_model_at_end` have their
    meaning.  `checkpoints` are arguments of the `Checkpointer`, such as ``{"save": on_preemption()}``: a
    policy `save` adds steps to those of `save_strategy`, `keep` replaces `save_total_limit`, and `root` or
    `tiers` replace the folder.  `items` are more items of each step, by name, such as an average of the
    weights.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Mapping[str, Any] | None = None,
        items: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        require_hooks("transformers", type(self))
        trainers.check_items(items)
        self._reknit_items = dict(items or {})
        self._reknit_given = dict(checkpoints or {})
        self._reknit_run: Checkpointer | None = None
        self._reknit_from: int | None = None
        self._reknit_saved, self._reknit_rng = Kept(), Kept()
        self.reknit_report: LoadReport | None = None
        """The report of the load from which this training goes on, None if it began otherwise."""
        self._reknit_data: TrainerLoader | None = None
        self._reknit_epoch_steps = 1
        self._reknit_scores: tuple[int, dict[str, Any]] = (-1, {})
        super().__init__(*args, **kwargs)
        self.add_callback(TrainerFollower(self))

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as the trainer does; all saves are committed when this returns.

        Raises the errors of `Checkpointer`, `UsageError` for another place to resume from, and
        `CheckpointExistsError` for a training that would begin anew beside its checkpoints.
        """
        with self._reknit_running(trial), TemporaryDirectory(prefix="reknit-") as folder:
            place = self._reknit_start(resume_from_checkpoint, self._get_output_dir(trial))
            while True:
                if self._reknit_from is not None:
                    trainers.write_progress(self._reknit_saved.values, place := folder)
                try:
                    return super().train(place, trial, ignore_keys_for_eval)
                except trainers.UnsoundStep as unsound:
                    self._reknit_find_older(unsound)

    @contextmanager
    def _reknit_running(self, trial: Any) -> Iterator[None]:
        """Open the run of one call of `train`, and close it."""
        if self.is_deepspeed_enabled:
            raise UsageError(
                "the trainer uses DeepSpeed, whose engine loads its checkpoints itself",
                remedy="use reknit.integrations.deepspeed in a loop of your own, or FSDP in the trainer",
            )
        given, self._reknit_root, self._reknit_decides = trainers.run_arguments(
            self._reknit_given, os.path.join(self._get_output_dir(trial), FOLDER), StepLimit.of(self.args)
        )
        try:
            with Checkpointer(**given) as self._reknit_run:
                yield
        finally:
            self._reknit_run = self._reknit_from = self._reknit_data = None

    def _reknit_start(self, where: Any, folder: str) -> str | None:
        """Find the step to resume from, or return the path of a checkpoint of transformers, or None.

        The newest of both counts.  A training that would begin before other work is refused here.
        """
        run, root = self._reknit_open, self._reknit_root
        saves = self._reknit_decides or self.args.save_strategy != "no"
        native: tuple[int, str] | None = (0, os.fspath(where)) if trainers.is_native(where) else None
        if native is None and (where is True or (where is None and saves)):
            alone = run if where is True else None
            native = self._reknit_ask("find", partial(trainers.newest_native, folder, alone))
        if where is True and native is not None and not (os.path.isdir(root) or run.latest() is not None):
            own = 0
        elif where and (where is True or native is None):
            own = self._reknit_find(where)
        else:
            own = 0
        if self._reknit_from is not None and (native is None or own >= native[0]):
            return None
        self._reknit_from = None
        if saves:
            after = 0 if native is None or not where else trainers.step_of(native[1])
            replaces = self._reknit_given.get("later_steps", "refuse") != "refuse"
            later = partial(trainers.refuse_later, run, root, after, replaces=replaces)
            self._reknit_ask("begin", later)
            if where is None:
                trainers.refuse_native(native)
            if self._reknit_given.get("other_run", "refuse") == "refuse":
                self._reknit_ask("owner", partial(refuse_living, root))
        if native is None or not where:
            return None
        logger.warning(
            "resumed from %s, a checkpoint of transformers: the next steps are saved below %s",
            native[1],
            root,
        )
        return native[1]

    def _reknit_ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the answer of rank 0; its errors are raised on all ranks."""
        options = self._reknit_given.get("options") or SaveOptions()
        return ask_root(acting(None, options.comm).group, name, options.timeout_s, question)

    def _reknit_find(self, where: Any) -> int:
        """Find the step to resume from, load the progress of the trainer, and return its number or 0."""
        run, self._reknit_saved = self._reknit_open, Kept()
        if where is True:
            following = run._resume({"trainer": self._reknit_saved}, None)  # the rest of the step says it
            self._reknit_from = following - 1 if following else None
        elif (number := trainers.number_at(where, self._reknit_root)) is not None:
            run.load({"trainer": self._reknit_saved}, number)
            self._reknit_from = number
        else:
            raise UsageError(
                f"resume_from_checkpoint={where!r} is neither a step of this run below {self._reknit_root} "
                "nor a checkpoint of transformers",
                remedy="pass True for the newest step; `reknit.load` fills a model from any other checkpoint",
            )
        if self._reknit_from is not None:
            saved = self._reknit_saved.values["adapters"]
            trainers.require_bases(saved, trainers.unwrapped(self))
        return self._reknit_from or 0

    def _reknit_find_older(self, unsound: trainers.UnsoundStep) -> None:
        """Go on from the newest older step, as `Checkpointer.resume` does.  Raises the error of the step."""
        run, before = self._reknit_open, self._reknit_from or 0
        if (older := trainers.newest_before(before, run.steps())) is None:
            raise unsound.error
        logger.warning("passed over step %d: %s", before, unsound.error.message)
        self._reknit_from = run.load({"trainer": self._reknit_saved}, older).step

    @property
    def _reknit_open(self) -> Checkpointer:
        if self._reknit_run is None:
            raise UsageError("the trainer does not train", remedy="call train() first")
        return self._reknit_run

    # Calls of transformers while it trains.

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **others: Any) -> None:
        """Save a step without waiting until it is written."""
        run, step = self._reknit_run, self.state.global_step
        if run is None:
            super()._save_checkpoint(model, trial, *more, **others)
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        path = below(self._reknit_root, step_name(step))
        if self.state.best_global_step == step:
            self.state.best_model_checkpoint = path
        data = self._reknit_data
        epoch = None if data is None else data.random_state()
        state = trainers.objects_of(self, Kept({**RngState().state_dict(), "loader": epoch}))
        if self.args.process_index == 0:  # times of evaluations in it differ between ranks
            progress = trainers.progress_of(self, ExportableState)
            state["trainer"] = Kept({**progress, "loader": None if data is None else data.position()})
        scores = self._reknit_scores[1] if self._reknit_scores[0] == step else None
        pending = run.save(step, state, scores, force=True)
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            self.save_model(self.args.output_dir, _internal_call=True)
            if pending is not None and self.args.hub_strategy != "every_save":  # the step is pushed as well
                pending.result()
            self._push_from_checkpoint(path)

    def _load_best_model(self) -> None:
        """Fill the model from the best step."""
        run = self._reknit_run
        best = None if run is None else self.state.best_model_checkpoint
        if run is None or (number := trainers.number_at(best, self._reknit_root)) is None:
            super()._load_best_model()
            return
        run.wait()
        run.load({"model": trainers.model_of(self)}, number)

    # Calls of transformers while it resumes; for its own checkpoints its own methods answer them.

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        if self._reknit_from is None:  # otherwise the weights come with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Fill all objects of the trainer from the step."""
        if self._reknit_from is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._reknit_rng = Kept()
        try:
            report = self._reknit_open.load(trainers.objects_of(self, self._reknit_rng), self._reknit_from)
        except VersionError:
            raise
        except UNSOUND as error:
            raise trainers.UnsoundStep(error) from error
        self.reknit_report = report
        if self.args.process_index == 0:
            say_resumed(report, self.args.world_size)
        best = self._reknit_saved.values["state"]["best_model_checkpoint"]
        self.state.best_model_checkpoint = trainers.moved(best, self._reknit_root)

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._reknit_from is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Set the random generators, once the samples before the step are skipped."""
        data = self._reknit_data
        if self._reknit_from is None:
            super()._load_rng_state(checkpoint)
        elif data is None or not data.has_continued:
            self._reknit_restore()
            if data is not None:
                data.begin()

    def _reknit_restore(self) -> None:
        """Set the random generators as they were at the step, if these ranks had saved them."""
        if self._reknit_rng.values:
            RngState().load_state_dict(self._reknit_rng.values)

    # Calls of transformers for its data.

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Note the number of steps of an epoch."""
        values = super().set_initial_training_values(*args, **kwargs)
        self._reknit_epoch_steps = values[1]
        return values

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step, from an epoch that continues as it had begun."""
        if self._reknit_run is not None and self._reknit_data is not None:
            epoch_iterator = self._reknit_data.batches(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def _reknit_follow(self, loader: Any) -> None:
        """Follow the loader of a training, from the position of the step."""
        self._reknit_data = TrainerLoader(loader, self.accelerator)
        if self.args.ignore_data_skip or not self.state.global_step:
            return
        epochs, steps = divmod(self.state.global_step, self._reknit_epoch_steps)
        resumed = self._reknit_from is not None
        self._reknit_data.resume(
            self._reknit_saved.values.get("loader") if resumed else None,
            self._reknit_rng.values.pop("loader", None) if resumed else None,
            (epochs, steps * self.args.gradient_accumulation_steps),
            self._reknit_restore,
        )


class ReknitTrainer(ReknitTrainerMixin, Trainer):
    """The Trainer of transformers, with checkpoints of reknit; see `ReknitTrainerMixin`."""
