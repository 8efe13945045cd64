"""Checkpoints of other programs: each is called by its name, in every call, and look-alikes are not.

Those of DeepSpeed, Megatron, Lightning and the libraries of Hugging Face are in the tests of these programs.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reknit
from reknit.cli.main import main
from reknit.engine.stored.hints import foreign, foreign_inside
from reknit.errors import FormatError
from reknit.integrations.formats.recognise import HEAD_NBYTES, WEIGHTS, file_at
from reknit.policies import every
from reknit.storage.base import HasFolderAbove
from reknit.storage.registry import open_storage
from reknit.testing.metered import MeteredStorage
from tests.optional import needs
from tests.running.cases import one_by_one_in
from tests.storage.tiny_s3 import TinyS3

if TYPE_CHECKING:
    from collections.abc import Callable

STATE: dict[str, Any] = {"model": {"w": np.ones(4)}}
TENSORS = {"w": torch.ones(4)}
GGUF = b"GGUF" + struct.pack("<IQQQ1sIQIQ11x", 3, 1, 0, 1, b"w", 1, 1, 0, 0)
"""A file of one tensor: the number zero."""
IMPORT = "`reknit import` makes a checkpoint of reknit of it"
"""The remedy for checkpoints that reknit opens as they are."""

OBSTORE = needs("obstore", "obstore")


def saved_by_others(root: Path) -> dict[str, tuple[Path, str, str]]:
    """Save the cheap kinds; return for each its place, the words of the message, and those of the remedy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=root / "dcp", no_dist=True)
        script: Any = torch.jit.script(torch.nn.Linear(2, 2))
        script.save(str(root / "script.pt"))
    torch.save(TENSORS, root / "new.pt")
    torch.save(TENSORS, root / "old.bin", _use_new_zipfile_serialization=False)
    save_file(TENSORS, root / "alone")
    np.savez(root / "a.npz", w=np.ones(3))
    np.savez_compressed(root / "c.npz", w=np.ones(3))
    np.save(root / "a.npy", np.ones(3))
    (root / "model").write_bytes(GGUF)
    (root / "lit.ckpt").write_bytes(b"")
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.0", "state_dict": TENSORS}, root / "lit.ckpt")
    for name in ("hf", "sharded", "peft", "config"):
        (root / name).mkdir(parents=True)
    save_file(TENSORS, root / "hf" / "model.safetensors")
    index = {"metadata": {"total_size": 16}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(TENSORS, root / "sharded" / "model-00001-of-00001.safetensors")
    save_file(TENSORS, root / "peft" / "adapter_model.safetensors")
    shutil.copytree(Path(__file__).parent / "bytecheckpoint" / "ddp", root / "bytecheckpoint")
    return {
        "dcp": (root / "dcp", r"torch\.distributed\.checkpoint \(DCP\)", IMPORT),
        "torch": (root / "new.pt", r"torch\.save writes", IMPORT),
        "old torch": (root / "old.bin", r"torch\.save writes", IMPORT),
        "script": (root / "script.pt", "TorchScript", "torch.jit.load("),
        "lightning": (root / "lit.ckpt", "of Lightning", IMPORT),
        "safetensors": (root / "alone", "a file of safetensors", IMPORT),
        "npz": (root / "a.npz", r"\.npz", IMPORT),
        "compressed npz": (root / "c.npz", r"\.npz", IMPORT),
        "npy": (root / "a.npy", r"\.npy", IMPORT),
        "gguf": (root / "model", "GGUF", IMPORT),
        "hf": (root / "hf", "Hugging Face", IMPORT),
        "sharded": (root / "sharded", "Hugging Face", IMPORT),
        "peft": (root / "peft", "PEFT", IMPORT),
        "bytecheckpoint": (root / "bytecheckpoint", "ByteCheckpoint", IMPORT),
    }


def test_every_call_names_the_program_and_a_way_to_read_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reknit.save(tmp_path / "own", STATE)
    for kind, (place, what, remedy) in saved_by_others(tmp_path).items():
        calls: list[Callable[[Path], object]] = [
            lambda at: reknit.load(at, STATE),
            reknit.open,
            reknit.verify,
        ]
        for call in calls if remedy != IMPORT else ():
            with pytest.raises(reknit.CheckpointNotFoundError, match=what) as caught:
                call(place)
            assert caught.value.remedy is not None, kind
            assert remedy in caught.value.remedy, kind
        roots: list[Callable[[Path], object]] = [
            reknit.latest,
            reknit.steps,
            lambda at: reknit.Checkpointer(at, save=every(steps=1)).resume({"model": {"w": np.ones(4)}}),
        ]
        other = foreign(open_storage(place))
        has_run = place.is_dir() and (other is None or other.kind not in WEIGHTS)
        for call in roots[: 3 if has_run else 2]:
            with pytest.raises(reknit.UsageError, match=what) as refused:
                call(place)
            assert remedy in str(refused.value), kind
        for words in (
            ["show", place],
            ["verify", place],
            ["ls", place],
            ["diff", tmp_path / "own", place],
            ["export", "hf", place, tmp_path / "out" / kind],
        ):
            status, said = main([str(word) for word in words]), capsys.readouterr().err
            if remedy == IMPORT and words[0] != "ls":
                assert status in (0, 1), (kind, words, said)
            else:
                assert status != 0
                assert remedy in said, (kind, words, said)


def test_a_folder_of_checkpoints_of_others_has_no_newest_and_a_run_warns_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("step_00000001", "tensorboard"):
        (tmp_path / "a" / name).mkdir(parents=True)
    save_file(TENSORS, tmp_path / "a" / "step_00000001" / "model.safetensors")
    (tmp_path / "b").mkdir()
    torch.save(TENSORS, tmp_path / "b" / "last.pt")
    for root, said in (("a", "step_00000001 in it is a model"), ("b", "files such as last.pt (torch.save)")):
        with reknit.Checkpointer(tmp_path / root, save=every(steps=1)) as run:
            looks: list[Callable[[Path], object]] = [
                reknit.latest,
                reknit.steps,
                lambda _, run=run: run.latest(),  # type: ignore[misc]
            ]
            for look in looks:
                caplog.clear()
                assert not look(tmp_path / root)
                assert said in caplog.text
        with pytest.raises(reknit.CheckpointNotFoundError) as caught:
            reknit.open(tmp_path / root)
        assert said in str(caught.value)
        reknit.save(tmp_path / root / "step_00000002", STATE, step=2)
        caplog.clear()
        assert reknit.latest(tmp_path / root) == str(tmp_path / root / "step_00000002")
        assert caplog.text == ""


def test_a_replica_of_another_program_is_named_when_it_is_needed(tmp_path: Path) -> None:
    other = saved_by_others(tmp_path)["dcp"][0]
    options = reknit.LoadOptions(replicas=(other,))
    with pytest.raises(reknit.CheckpointNotFoundError, match=r"the replica .*dcp is a checkpoint of torch"):
        reknit.open(tmp_path / "absent", options=options)
    reknit.save(tmp_path / "own", STATE)
    data = next(path for path in (tmp_path / "own").rglob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(reknit.CorruptError, match=r"no replica has them.*is a checkpoint of torch"):
        reknit.load(tmp_path / "own", {"model": {"w": np.zeros(4)}}, options=options)


# Names alone, and hostile content.

NAMES = (
    ".metadata",
    "metadata.json",
    "model/.metadata",
    "mp_rank_00/model_optim_rng.pt",
    "mp_rank_00_model_states.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_config.json",
    "manifest.ocdbt",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "zero_to_fp32.py",
    "latest_checkpointed_iteration.txt",
    "last.ckpt",
    "a.npz",
    "a.gguf",
)
CONTENTS = {
    "empty": b"",
    "zeros": bytes(64),
    "a huge header": (1 << 62).to_bytes(8, "little") + b'{"w":{"dtype":"F32"',
    "a header beyond the end": (500).to_bytes(8, "little") + b'{"w":{"dtype":"F32"' + b" " * 100,
    "deep JSON": b'{"a":' * 100_000,
    "deep lists": b"[" * 100_000,
    "a name beyond the end of an archive": b"PK\x03\x04" + b"\xff" * 40,
    "a pickle cut short": b"\x80",
    "GGUF of no version": b"GGUF" + bytes(20),
}


def test_a_name_alone_shows_nothing(tmp_path: Path) -> None:
    for content, folder in one_by_one_in(tmp_path, CONTENTS.values()):
        for number, name in enumerate(NAMES):
            path = folder / str(number) / name
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            storage = open_storage(folder / str(number))
            assert foreign(storage) is None, name
            assert foreign_inside(storage) is None, name
            with pytest.raises(reknit.CheckpointNotFoundError, match="pass the folder of a checkpoint"):
                reknit.open(folder / str(number))
            with pytest.raises(reknit.CheckpointNotFoundError, match=r"it is a (file|zip archive)"):
                reknit.open(path)


def test_pipes_folders_and_dead_links_are_not_opened(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)):
            folder = tmp_path / f"{number}-{getattr(make, '__name__', '')}"
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                path.unlink()
            make(path)
            assert foreign(open_storage(folder)) is None
            with pytest.raises(reknit.CheckpointNotFoundError):
                reknit.open(folder)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(reknit.ReknitError):
        reknit.open(tmp_path / "pipe.pt")


def test_a_look_reads_a_few_thousand_bytes_and_no_more(tmp_path: Path) -> None:
    places = saved_by_others(tmp_path)
    with (tmp_path / "new.pt").open("ab") as file:
        file.truncate(1 << 34)
    for place, _, _ in places.values():
        storage = MeteredStorage(open_storage(place))
        assert foreign(storage) is not None
        figures = storage.meter.figures
        assert sum(each.nbytes for each in figures.values()) <= 4 * HEAD_NBYTES
        assert sum(each.count for each in figures.values()) <= 40


def test_a_file_system_of_fsspec_shows_the_file_at_its_root() -> None:
    pytest.importorskip("fsspec")
    import fsspec

    fsspec.filesystem("memory").pipe_file("/foreign/model.bin", GGUF)
    with reknit.open("memory://foreign/model.bin") as checkpoint:
        assert checkpoint.read("model", "w").tolist() == [0.0]
    assert file_at(open_storage("memory://foreign")) is None


@OBSTORE
def test_an_object_store_shows_the_file_at_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "any"), ("SECRET_ACCESS_KEY", "any"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with TinyS3("kept") as server:
        server.files["bucket/runs/model.bin"] = GGUF
        server.files["bucket/runs/dcp/.metadata"] = (
            b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata"
        )
        with reknit.open(f"s3://bucket/runs/model.bin?endpoint={server.endpoint}") as checkpoint:
            assert checkpoint.read("model", "w").tolist() == [0.0]
        with pytest.raises(FormatError, match="DCP, which cannot be opened"):
            reknit.open(f"s3://bucket/runs/dcp?endpoint={server.endpoint}")
        for place in ("s3://bucket", "s3://bucket/runs"):
            assert file_at(open_storage(f"{place}?endpoint={server.endpoint}")) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/folders/x", ("/folders", "x")),
        ("/", None),
        pytest.param("s3://bucket/a/b", ("s3://bucket/a", "b"), marks=OBSTORE),
        pytest.param("s3://bucket/b", ("s3://bucket", "b"), marks=OBSTORE),
        pytest.param("s3://bucket", None, marks=OBSTORE),
    ],
)
def test_the_store_above_is_that_of_the_folder_above(url: str, expected: tuple[str, str] | None) -> None:
    storage = open_storage(url)
    assert isinstance(storage, HasFolderAbove)
    above = storage.above()
    assert (above and (above[0].url, above[1])) == expected
