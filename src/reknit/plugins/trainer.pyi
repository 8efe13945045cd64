"""The names that checkpoints of a trainer may import; `trainer.py` imports each one when it is used."""

from reknit.api.ranks import AnyGroup as AnyGroup
from reknit.api.ranks import acting as acting
from reknit.comm.group import Group as Group
from reknit.engine.stored.at_path import manifest_in as manifest_in
from reknit.engine.stored.recognising import manifest_exists as manifest_exists
from reknit.engine.stored.run_record import read_line as read_line
from reknit.engine.stored.steps import folder_in as folder_in
from reknit.engine.stored.steps import numbered as numbered
from reknit.engine.stored.steps import step_name as step_name
from reknit.frameworks.stateful import Accessors as Accessors
from reknit.frameworks.stateful import Kept as Kept
from reknit.frameworks.stateful import is_stateful as is_stateful
from reknit.policies.keep_policies import ranked as ranked
from reknit.policies.policy import KeepPolicy as KeepPolicy
from reknit.policies.policy import KeepRule as KeepRule
from reknit.policies.save_policies import RunCosts as RunCosts
from reknit.runs.agreement import ask_root as ask_root
from reknit.runs.folder import BEGIN_ANEW as BEGIN_ANEW
from reknit.runs.folder import LaterSteps as LaterSteps
from reknit.runs.folder import OtherRun as OtherRun
from reknit.runs.folder import refuse_living as refuse_living
from reknit.runs.load_step import UNSOUND as UNSOUND
from reknit.runs.load_step import say_resumed as say_resumed
from reknit.runs.pending_saves import forbid_markers as forbid_markers
from reknit.runs.pending_saves import wait_for_agents as wait_for_agents
from reknit.runs.tiers import below as below
