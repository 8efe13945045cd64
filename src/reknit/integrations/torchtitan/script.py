"""The checkpoint manager for torchtitan, in the place of the one in its config.

`ReknitCheckpointManager.Config` takes the fields of torchtitan's own, and builds the manager that saves,
resumes, keeps the newest steps, and reads and writes Hugging Face's format.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.stateful import Stateful

import reknit
from reknit import Checkpointer, policies
from reknit.errors import MismatchError, MissingExtraError, UsageError
from reknit.integrations.dcp import script as dcp
from reknit.options import LoadOptions, SaveOptions  # noqa: TC001 - tyro reads the types of a config
from reknit.plugins.trainer import BEGIN_ANEW, say_resumed

try:
    import tyro
    from torchtitan.components import checkpointer as titan
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
except ImportError as error:
    raise MissingExtraError(
        f"this needs torchtitan: {error}", remedy="pip install 'reknit[torchtitan]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit import PendingSave

_STEP = re.compile(r"step-([0-9]{1,18})")
_MODES = ("disabled", "async", "async_with_pinned_mem")


class ReknitCheckpointManager(titan.BaseCheckpointManager):  # type: ignore[misc]
    """The steps of a torchtitan run below its folder, as checkpoints of reknit.

    Put its `Config` into `Trainer.Config.checkpoint`.  A step has the items of torchtitan: ``model``,
    ``optimizer``, ``lr_scheduler``, ``dataloader``, ``train_state``, with torchtitan's names in them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.BaseCheckpointManager.Config):  # type: ignore[misc]
        """The config of torchtitan's managers, and the options of reknit."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """With "disabled" the trainer waits for saves.  Otherwise it waits for copies, which agents write."""

        save_options: Annotated[SaveOptions | None, tyro.conf.Suppress] = None
        """The options of every save."""

        load_options: Annotated[LoadOptions | None, tyro.conf.Suppress] = None
        """The options of every load."""

        other_run: Literal["refuse", "take_over"] = "refuse"
        """"refuse" does not begin while another run lives in the folder; "take_over" takes it from that."""

        def __post_init__(self) -> None:
            titan.BaseCheckpointManager.Config.__post_init__(self)
            self.async_mode = self.async_mode.lower()  # type: ignore[assignment]
            if self.async_mode not in _MODES:
                raise UsageError(f"async_mode is one of {', '.join(_MODES)}, not {self.async_mode!r}")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: PendingSave | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError(
                "last_save_in_hf needs a state dict adapter, and the model has none",
                remedy="set checkpoint.last_save_in_hf to False, or give the model spec a state_dict_adapter",
            )
        self.config, self.sd_adapter, self.states = config, sd_adapter, states
        self.folder = filesystem.join(base_folder, config.folder)
        states.update(
            {
                titan.MODEL: titan.ModelWrapper(model_parts),
                titan.OPTIMIZER: optimizers,
                titan.DATALOADER: dataloader,
                titan.LR_SCHEDULER: lr_schedulers,
            }
        )
        self._steps = Checkpointer(
            self.folder,
            keep=policies.latest(config.keep_latest_k) if config.keep_latest_k else None,
            wait=config.async_mode == "disabled",
            options=config.save_options,
            load_options=config.load_options,
            other_run=config.other_run,
        )

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save a step if it is due; the last one is committed when this returns."""
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (first or last_step or curr_step % config.interval == 0):
            return False
        model_only = last_step and config.last_save_model_only
        state = self._state(model_only=model_only)
        if model_only:
            state[titan.MODEL] = _converted(state[titan.MODEL], TORCH_DTYPE_MAP[config.export_dtype])
            if config.last_save_in_hf:
                self._export(curr_step, state[titan.MODEL])
                return True
        self.save_future = self._steps.save(curr_step, state, force=True)
        if last_step or config.async_mode == "disabled":
            self.maybe_wait_for_saving()
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load a step, or the newest committed step, or the checkpoint with which a new run begins."""
        try:
            return self._load_whole(step)
        except MismatchError as error:
            error.remedy = f"{error.remedy}; checkpoint.exclude_from_loading leaves whole states out"
            raise

    def _load_whole(self, step: int) -> bool:
        if step != -1:
            state = self._wanted(model_only=step == 0)
            report = self._steps.load(state, step)
            if not dist.is_initialized() or dist.get_rank() == 0:
                say_resumed(report, dist.get_world_size() if dist.is_initialized() else 1)
            self._give(state)
            return True
        return self._resumed() or self._begun()

    def _resumed(self) -> bool:
        """Load the newest committed step; return whether there is one.  Step 0 has a model only."""
        newest = [self._steps.latest()]
        if dist.is_initialized():
            dist.broadcast_object_list(newest)
        if self.config.load_only and newest[0] is None:
            return False
        state = self._wanted(model_only=newest[0] == 0)
        if self.config.load_only:  # the folder may be that of a run that goes on
            self._steps.load(state)
        elif not (reached := self._continued(state)):
            return False
        elif newest[0] == 0 and reached > 1:  # an agent of an earlier run has committed a step since
            return self._resumed()
        self._give(state)
        return True

    def _continued(self, state: dict[str, Any]) -> int:
        """Resume, and return the next step.  A config that names a beginning may begin beside other work."""
        config = self.config
        begins = config.initial_load_path or config.initial_load_in_hf
        try:
            return self._steps.resume(state, start=0 if begins else None)
        except UsageError as error:
            if self._steps.latest() is not None:
                raise
            if (found := _own_steps(self.folder)) is None:
                error.remedy = _in_words_of_config(error.remedy or "")
                raise
            raise UsageError(
                f"there is no step of reknit below {self.folder}, but {found} is one of torchtitan's own",
                remedy=_in_words_of_config(f"to go on from it: resume(state, start={found!r}); {BEGIN_ANEW}"),
                path=found,
            ) from error

    def _begun(self) -> bool:
        """Load the checkpoint with which a new run begins; return whether the config names one."""
        config, path = self.config, self.config.initial_load_path
        if config.initial_load_in_hf:
            if self.sd_adapter is None:
                raise UsageError(
                    "initial_load_in_hf needs a state dict adapter, and the model has none",
                    remedy="set checkpoint.initial_load_in_hf to False, or give the model spec a "
                    "state_dict_adapter",
                )
            if not (path := path or self.sd_adapter.hf_assets_path):
                raise UsageError(
                    "initial_load_in_hf needs a folder",
                    remedy="set checkpoint.initial_load_path or hf_assets_path to one",
                )
            self._import(path)
            return True
        if not path:
            return False
        state = self._wanted(model_only=config.initial_load_model_only)
        if dcp.is_torchs(path):
            names = {**state.pop(titan.MODEL), **state}
            dcp.load(names, checkpoint_id=path)
            own = {key: names.pop(key) for key in state}
            self._give({titan.MODEL: names, **own})
        else:
            reknit.load(path, state, options=config.load_options)
            self._give(state)
        return True

    def _import(self, path: str) -> None:
        """Load the weights of a model from a folder in Hugging Face's format."""
        weights = self.sd_adapter.to_hf(self.states[titan.MODEL].state_dict())
        reader = self.sd_adapter.get_hf_storage_reader(path, self.config.initial_load_in_hf_quantized)
        torch_dcp.load(weights, storage_reader=reader)
        self.states[titan.MODEL].load_state_dict(self.sd_adapter.from_hf(weights))

    def _export(self, step: int, model: dict[str, Any]) -> None:
        """Write the weights of a model in Hugging Face's format, into a folder beside the steps."""
        writer = torch_dcp.HuggingFaceStorageWriter(
            path=filesystem.join(self.folder, f"step-{step}"),
            save_distributed=True,
            fqn_to_index_mapping=self.sd_adapter.fqn_to_index_mapping,
            enable_consolidation=True,
        )
        torch_dcp.save(self.sd_adapter.to_hf(model), storage_writer=writer)

    def _state(self, *, model_only: bool = False) -> dict[str, Any]:
        """Return the state by items, as torchtitan's objects return it."""
        kept = {key: value for key, value in self.states.items() if key == titan.MODEL or not model_only}
        return {key: _state_of(value) for key, value in kept.items() if value is not None}

    def _wanted(self, *, model_only: bool) -> dict[str, Any]:
        """Return the part of the state that is loaded."""
        excluded = self.config.exclude_from_loading
        if unknown := sorted(set(excluded) - set(self.states)):
            raise UsageError(
                f"exclude_from_loading has {unknown}", remedy=f"the states are {sorted(self.states)}"
            )
        state = self._state(model_only=model_only)
        return {key: value for key, value in state.items() if key not in excluded}

    def _give(self, state: Mapping[str, Any]) -> None:
        """Give loaded states to their objects."""
        for key, value in state.items():
            if isinstance(self.states[key], Stateful):
                self.states[key].load_state_dict(value)
            else:
                self.states[key] = value

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save has copied the state when it returns."""

    def _wait_for_saving(self) -> None:
        """Wait for the commit of the last save."""
        pending, self.save_future = self.save_future, None
        if pending is not None:
            pending.result()

    def _close(self) -> None:
        """Wait for all saves; after an error agents finish them, as the other ranks may not come."""
        self._steps.__exit__(*sys.exc_info())


def _in_words_of_config(remedy: str) -> str:
    """Return a remedy that names fields of the config in place of the keyword of `Checkpointer.resume`."""
    goes_on = r"set checkpoint.initial_load_path to \1 and checkpoint.initial_load_model_only to False"
    own = re.sub(r"resume\(state, start=('.*?'|\".*?\")\)", goes_on, remedy)
    return own.replace(BEGIN_ANEW, "to begin anew, set another checkpoint.folder")


def _own_steps(folder: str) -> str | None:
    """Return the newest step that torchtitan's own manager has saved in a folder, or None."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = sorted((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name)))
    return next((place for _, name in reversed(found) if dcp.is_torchs(place := f"{folder}/{name}")), None)


def _state_of(value: Any) -> Any:
    """Return the state of an object as new dicts, whose tensors are those of the object."""
    return dict(value.state_dict()) if isinstance(value, Stateful) else value


def _converted(model: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in model.items()
    }
