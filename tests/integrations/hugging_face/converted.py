"""Small models of transformers whose files have other names or shapes, for `test_conversion`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import reknit
from reknit.integrations.formats.import_ import import_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts, and a router of another name": ("MixtralForCausalLM", {"num_local_experts": 3}),
    "experts in some layers, and shared ones": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_tok": 2,
        },
    ),
    "experts and a tied head": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 2, "moe_intermediate_size": 8, "tie_word_embeddings": True},
    ),
    "tensors that become three": ("NomicBertModel", {}),
    "a head of another name": ("GPTNeoXForCausalLM", {}),
    "nothing": ("LlamaForCausalLM", {}),
}  # fmt: skip
"""For each difference of files and state, a model that has it."""


def model_of(family: str, seed: int) -> Any:
    """Return a model with random weights."""
    import transformers

    name, more = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**SMALL | more, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    for parameter in model.parameters():
        parameter.data.normal_()
    return model.eval()


def loaded(families: list[str], folder: Path) -> dict[str, tuple[bool, bool]]:
    """Return for each family whether files have other names, and whether a load equals `from_pretrained`."""
    found = {}
    for number, family in enumerate(families):
        path, live = folder / str(number), model_of(family, 2)
        (saved := model_of(family, 1)).save_pretrained(path)
        right = type(saved).from_pretrained(path).state_dict()
        with reknit.open(path) as checkpoint:
            differ = not checkpoint.tensors["model"].keys() <= right.keys()
        report = reknit.load(path, {"model": live})
        assert (report.missing, report.unexpected, report.notes) == ((), (), {})
        equal = all(torch.equal(tensor, right[name]) for name, tensor in live.state_dict().items())
        found[family] = differ, equal
    return found


def imported_and_wrapped(folder: Path) -> list[bool]:
    """Return whether the weights are right after an import, in a compiled model, and with given rules."""
    family = "experts, and a router of another name"
    (saved := model_of(family, 1)).save_pretrained(folder / "hf")
    import_checkpoint(folder / "hf", folder / "own")
    found = []
    for path, wrap in (("own", lambda one: one), ("hf", torch.compile)):
        live = model_of(family, 2)
        reknit.load(folder / path, {"model": wrap(live)})
        found.append(_same(live, saved))
    live = model_of(family, 2)
    from reknit.integrations.hugging_face.conversion import Conversion

    reknit.load(folder / "hf", {"model": live}, options=reknit.LoadOptions(transforms=[Conversion(live)]))
    return [*found, _same(live, saved)]


def refused(folder: Path) -> str:
    """Return the error of a load into a model whose table has an operation that a load does not have."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    model_of("nothing", 1).save_pretrained(folder)
    gate = "mlp.gate_proj.weight"
    table = [WeightConverter(gate, gate, [Interleave(dim=0)])]
    register_checkpoint_conversion_mapping("llama", table, overwrite=True)  # type: ignore[arg-type]
    live = model_of("nothing", 2)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    try:
        reknit.load(folder, {"model": live})
    except reknit.errors.MismatchError as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
        return str(error)
    return ""


def sharded(folder: Path) -> bool:
    """Load experts into a model that two ranks share; return whether this rank's parts are right."""
    from torch.distributed.fsdp import fully_shard

    family = "experts, and a router of another name"
    saved, live = model_of(family, 1), model_of(family, 2)
    if dist.get_rank() == 0:
        saved.save_pretrained(folder)
    dist.barrier()
    for layer in live.model.layers:
        fully_shard(layer)
    fully_shard(live)
    reknit.load(folder, {"model": live})
    whole = {name: tensor.full_tensor() for name, tensor in live.state_dict().items()}
    return all(torch.equal(whole[name], tensor) for name, tensor in saved.state_dict().items())


def _same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
