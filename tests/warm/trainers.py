"""The models and the Trainer of transformers, PEFT and TRL."""

import os
from importlib import import_module
from importlib.util import find_spec

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import transformers

import reknit.integrations.transformers  # noqa: F401
import tests.warm.plain  # noqa: F401

# Its classes are imported when they are first named.
_ = transformers.TrainingArguments, transformers.LlamaForCausalLM, transformers.Qwen3MoeForCausalLM
if find_spec("deepspeed"):
    import_module("deepspeed")  # Accelerate asks whether a model is one of its engines
if find_spec("trl"):
    _ = import_module("trl").SFTTrainer
