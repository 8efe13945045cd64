"""The names that checkpoints of a trainer may import; `trainer.py` imports each one when it is used."""

from reknit.api.ranks import acting as acting
from reknit.engine.stored.steps import step_name as step_name
from reknit.frameworks.per_rank import RngState as RngState
from reknit.frameworks.stateful import Kept as Kept
from reknit.runs.agreement import ask_root as ask_root
from reknit.runs.checkpointer import Checkpointer as Checkpointer
from reknit.runs.tiers import below as below
