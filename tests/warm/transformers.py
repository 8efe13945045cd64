"""The models of Hugging Face."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import transformers

import tests.warm.plain  # noqa: F401

# Its classes are imported when they are first named.
_ = transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM, transformers.AutoModelForCausalLM
