"""Folders as transformers and PEFT write and read them, for the tests of the same names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, torch.Tensor]
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def tensors(value: float) -> Tensors:
    return {"a.weight": torch.full((4, 4), value), "b.weight": torch.full((4, 4), value + 0.5)}


def index(folder: Path, name: str, files: dict[str, str]) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 128}, "weight_map": files}))


def single(folder: Path, value: float, name: str = "model.safetensors") -> None:
    save_file(tensors(value), folder / name, metadata={"format": "pt"})


def sharded(folder: Path, value: float) -> None:
    parts = {name: f"model-0000{n}-of-00002.safetensors" for n, name in enumerate(tensors(0), 1)}
    for name, file in parts.items():
        save_file({name: tensors(value)[name]}, folder / file, metadata={"format": "pt"})
    index(folder, "model.safetensors.index.json", parts)


def old(folder: Path, value: float) -> None:
    torch.save(tensors(value), folder / "pytorch_model.bin")


def old_sharded(folder: Path, value: float) -> None:
    parts = {name: f"pytorch_model-0000{n}-of-00002.bin" for n, name in enumerate(tensors(0), 1)}
    for name, file in parts.items():
        torch.save({name: tensors(value)[name]}, folder / file)
    index(folder, "pytorch_model.bin.index.json", parts)


def many_shards(folder: Path) -> list[str]:
    """Make a model of 40 shards; return their names, which are those of its tensors, too."""
    names = [f"model-{number:05}-of-00040.safetensors" for number in range(1, 41)]
    for name in names:
        save_file({name: torch.ones(1)}, folder / name)
    index(folder, "model.safetensors.index.json", dict(zip(names, names, strict=True)))
    return names


WRITERS: dict[str, Callable[[Path, float], None]] = {
    "model.safetensors": single,
    "model.safetensors.index.json": sharded,
    "pytorch_model.bin": old,
    "pytorch_model.bin.index.json": old_sharded,
}
"""The files with which a model begins.  Each has weights of its own."""


def model_in(path: Path, files: dict[str, float], **config: Any) -> Path:
    """Make a folder with these models, and with files that transformers does not read."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "reknit_tiny", **config}))
    for name, value in files.items():
        if name in WRITERS:
            WRITERS[name](path, value)
        else:
            single(path, value, name)
    single(path, 90.0, "model.fp16.safetensors")
    single(path, 91.0, "consolidated.safetensors")
    for name in ("tf_model.h5", "flax_model.msgpack"):
        (path / name).write_bytes(bytes(16))
    return path


def tiny() -> Any:
    """Return the class of a model with the tensors of these folders."""
    from transformers import PretrainedConfig, PreTrainedModel

    class TinyConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
        model_type = "reknit_tiny"

    class Tiny(PreTrainedModel):  # type: ignore[no-untyped-call]
        config_class = TinyConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.a = torch.nn.Linear(4, 4, bias=False)
            self.b = torch.nn.Linear(4, 4, bias=False)
            self.post_init()  # type: ignore[no-untyped-call]

        def _init_weights(self, module: Any) -> None:
            pass

    return Tiny


def taken(paths: list[Path]) -> list[Tensors | None]:
    """Return the weights that `from_pretrained` takes of each folder, None if it finds none."""
    kind = tiny()
    found: list[Tensors | None] = []
    for path in paths:
        try:
            found.append(dict(kind.from_pretrained(path).state_dict()))
        except OSError:
            found.append(None)
    return found


def save_distributed(folder: Path, ranks: int) -> list[Tensors | None]:
    """Save as the ranks of a job that shards its tensors; return the weights that transformers takes."""
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    whole = {name: torch.arange(16.0).view(4, 4) + n for n, name in enumerate(tensors(0))}
    state = {name: distribute_tensor(one, mesh, [Shard(n)]) for n, (name, one) in enumerate(whole.items())}
    save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return taken([folder])


def llama() -> Any:
    """Return a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=28, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def save_in_shards(folder: Path) -> None:
    """Save a model as `save_pretrained` does with a small limit."""
    llama().save_pretrained(folder, max_shard_size="6KB")


def train(folder: Path) -> tuple[Tensors, list[str]]:
    """Let the Trainer of transformers save a checkpoint; return its weights, and the files of the folder."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": (row := torch.arange(4) + n), "labels": row} for n in range(4)]
    given: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_safetensors": True}
    given = {name: one for name, one in given.items() if name in TrainingArguments.__dataclass_fields__}
    args = TrainingArguments(str(folder), max_steps=1, save_steps=1, **given)
    trainer = Trainer(model=llama(), args=args, train_dataset=rows)
    trainer.train()
    saved = folder / "checkpoint-1"
    kind: Any = type(trainer.model)
    weights = kind.from_pretrained(saved).state_dict()
    return dict(weights), sorted(each.name for each in saved.iterdir())


def compress(folder: Path) -> bool:
    """Save a model with FP8 weights; return whether a load of it equals `from_pretrained`."""
    from compressed_tensors import compressors, quantization

    import reknit

    model = llama()
    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format="float-quantized"
    )
    quantization.apply_quantization_config(model, config)
    for name, parameter in model.named_parameters():
        if name.endswith("weight_scale"):
            parameter.data.uniform_(0.001, 0.01)
    compressor = compressors.ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    right, live = (type(model).from_pretrained(folder) for _ in range(2))
    for tensor in (*live.parameters(), *live.buffers()):
        tensor.data.zero_()
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in right.parameters())
    reknit.load(folder, {"model": live})
    pairs = zip(right.state_dict().values(), live.state_dict().values(), strict=True)
    return all(
        torch.equal(*(one.contiguous().reshape(-1).view(torch.uint8) for one in pair)) for pair in pairs
    )


def save_adapter(folder: Path, beside: list[Path]) -> list[Tensors]:
    """Save a model and an adapter, alone and beside the model; return the weights that transformers takes."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = llama()
    for path in beside:
        model.save_pretrained(path)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, lora)
    for path in (folder, *beside):
        adapted.save_pretrained(path)
    found = [dict(PeftModel.from_pretrained(llama(), folder).state_dict())]
    for path in beside:
        found.append(dict(type(model).from_pretrained(path).state_dict()))
    return found


def equal(a: dict[str, Any], b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
