"""Ready-made rules between the models of Megatron-Core or torchtitan and those of Hugging Face.

Each function takes the config of the Hugging Face model: ``model.config`` of `transformers`, or the
dictionary in ``config.json``.  Its ``model_type`` selects the rules.  Names are those of a model of
`transformers` 5 or newer with an output head (``...ForCausalLM``).  Models have all experts of a layer in one
tensor; files have each expert by itself.  The functions raise `UsageError` for a family without a map,
and for a config with fields that the map is not for.  As loads are strict, a tensor without a rule
is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, shown
from reknit.integrations.hugging_face.models import file_rules, read_config
from reknit.integrations.megatron.rules import SPECS, megatron_rules
from reknit.integrations.torchtitan.rules import BALANCE, torchtitan_rules
from reknit.keywords import checked_call
from reknit.transforms import drop

if TYPE_CHECKING:
    from reknit.integrations.megatron.rules import Spec
    from reknit.transforms import Rule

__all__ = [
    "hugging_face_to_megatron",
    "hugging_face_to_torchtitan",
    "megatron_to_hugging_face",
    "torchtitan_to_hugging_face",
]


@checked_call
def megatron_to_hugging_face(config: Any, *, files: bool = False) -> list[Rule]:
    """Return the rules from a GPT model of Megatron-Core to a model of Hugging Face.

    The padding of the vocabulary is removed.  With `files`, names are those in files.  Raises `UsageError`.
    """
    model = read_config(config)
    return [*megatron_rules(model), *(file_rules(model.family) if files else ())]


@checked_call
def hugging_face_to_megatron(
    config: Any, *, padded_vocab_size: int | None = None, spec: Spec = "transformer_engine"
) -> list[Rule]:
    """Return the rules from a model or files of Hugging Face to a GPT model of Megatron-Core.

    The vocabulary is padded with zeros to `padded_vocab_size`.  An output head that is tied to the embedding
    is left out, as Megatron does not save it.  `spec` is the layer spec of Megatron:
    ``"transformer_engine"``, which has most norms in the linear layers that follow, or ``"local"``.  Raises
    `UsageError`.
    """
    if spec not in SPECS:
        raise UsageError(f"spec is one of {', '.join(map(repr, SPECS))}, not {shown(spec)}")
    model = read_config(config)
    if padded_vocab_size is not None and padded_vocab_size < model.vocab_size:
        raise UsageError(
            f"the vocabulary of {model.vocab_size} entries cannot be padded to {padded_vocab_size}",
            remedy="give the number of rows of Megatron's embedding as padded_vocab_size",
        )
    rules = [*megatron_rules(model, padded=padded_vocab_size, spec=spec), *file_rules(model.family)]
    head = [drop("lm_head.weight", optional=True)] if model.tied else []
    return [*head, *_inverse(rules)]


@checked_call
def torchtitan_to_hugging_face(config: Any, *, files: bool = False) -> list[Rule]:
    """Return the rules from a model of torchtitan to a model of Hugging Face.

    The bias that balances the load of experts is left out for all families but DeepSeek's.  With `files`,
    names are those in files.  Raises `UsageError`.
    """
    model = read_config(config)
    return [
        *torchtitan_rules(model),
        drop(BALANCE, optional=True),
        *(file_rules(model.family) if files else ()),
    ]


@checked_call
def hugging_face_to_torchtitan(config: Any) -> list[Rule]:
    """Return the rules from a model or files of Hugging Face to a model of torchtitan.

    Hugging Face does not have the bias that balances the load of experts, except for DeepSeek's models: a
    load has to be lenient for ``expert_bias_E``.  Raises `UsageError`.
    """
    model = read_config(config)
    return _inverse([*torchtitan_rules(model), *file_rules(model.family)])


def _inverse(rules: list[Rule]) -> list[Rule]:
    return [rule.inverse() for rule in reversed(rules)]
