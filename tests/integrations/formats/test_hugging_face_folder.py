"""Folders of Hugging Face: the weights that `from_pretrained` takes there are opened, and no others."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import reknit
from reknit.cli.main import main
from reknit.errors import CorruptError, FormatError, MismatchError, UsageError
from reknit.integrations.formats.import_ import import_checkpoint
from reknit.integrations.hugging_face.export import export_hf
from reknit.integrations.hugging_face.safetensors import read_folder
from reknit.storage.local.store import LocalStorage
from reknit.testing.metered import MeteredStorage
from tests import ranks
from tests.integrations.formats import hugging_face_folders as hf
from tests.integrations.formats.damage import CUT, EMPTIED, REMOVED, SWAPPED, damages, wrong_in_silence
from tests.optional import needs
from tests.running.cases import one_by_one_in
from tests.running.examples import thinned

run = partial(ranks.run, 1, warm="trainers", joined=False)


def kind_of(checkpoint: Any) -> str:
    """Return the program that wrote a checkpoint."""
    return str(checkpoint.manifest.other.kind)


@needs("transformers", "transformers")
def test_of_every_combination_of_files_the_weights_of_from_pretrained_are_opened(tmp_path: Path) -> None:
    mine = "mine.safetensors"
    cases: dict[Path, list[str]] = {}
    for chosen in thinned(product((False, True), repeat=1 + len(hf.WRITERS)), 3):
        files = [name for name, has in zip((mine, *hf.WRITERS), chosen, strict=True) if has]
        named = {"transformers_weights": mine} if mine in files else {}
        values = {name: float(number) for number, name in enumerate(files)}
        cases[hf.model_in(tmp_path / str(len(cases)), values, **named)] = files
    (found,) = run(hf.taken, list(cases))
    for (path, files), right in zip(cases.items(), found, strict=True):
        if right is None:
            assert not files
            with pytest.raises(reknit.ReknitError):
                reknit.open(path)
            continue
        state = {"model": hf.tensors(-1.0)}
        report = reknit.load(path, state)
        assert hf.equal(state["model"], right), files
        assert set(report.notes) == set(files[1:])


def test_models_of_one_folder_that_differ_are_named_and_an_import_asks_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["model.safetensors", "model.safetensors.index.json"]
    path = hf.model_in(tmp_path / "hf", dict(zip(names, (2.0, 1.0), strict=True)))
    with reknit.open(path) as checkpoint:
        assert hf.equal(checkpoint.read_all(["model"])["model"], hf.tensors(2.0))
    assert all(name in caplog.text for name in names)
    to = tmp_path / "own"
    with pytest.raises(UsageError, match=r"--weights model\.safetensors"):
        import_checkpoint(path, to)
    assert not to.exists()
    for name, value in zip(names, (2.0, 1.0), strict=True):
        assert main(["import", str(path), str(to), "--weights", name, "--overwrite"]) == 0, (
            capsys.readouterr()
        )
        with reknit.open(to) as checkpoint:
            assert hf.equal(checkpoint.read_all(["model"])["model"], hf.tensors(value))
        with reknit.open(path / name) as checkpoint:  # the way to any of them
            assert hf.equal(checkpoint.read_all(["model"])["model"], hf.tensors(value))


def test_the_same_model_in_two_forms_is_imported_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = hf.model_in(tmp_path / "hf", dict.fromkeys(hf.WRITERS, 3.0))
    weights = torch.load(path / "pytorch_model.bin")
    torch.save({**weights, "tied.weight": weights["a.weight"]}, path / "pytorch_model.bin")
    import_checkpoint(path, tmp_path / "own")
    assert not caplog.text


def test_a_difference_in_one_tensor_of_many_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for change, folder in one_by_one_in(tmp_path, ["dtype", "name", "middle"]):
        path = hf.model_in(folder / "hf", {})
        one = {f"{n}.weight": torch.zeros(4096) for n in range(8)}
        save_file(one, path / "model.safetensors")
        other = {name: tensor.clone() for name, tensor in one.items()}
        if change == "dtype":
            other["7.weight"] = other["7.weight"].half()
        elif change == "name":
            other["8.weight"] = torch.zeros(1)
        else:
            other["7.weight"][2048] = 1.0
        torch.save(other, path / "pytorch_model.bin")
        caplog.clear()
        reknit.open(path).close()
        assert "pytorch_model.bin: it holds another model" in caplog.text


def test_files_without_which_a_model_is_whole_do_not_close_its_folder(tmp_path: Path) -> None:
    path = hf.model_in(tmp_path / "hf", {"model.safetensors": 2.0})
    hf.index(path, "pytorch_model.bin.index.json", {"a.weight": "pytorch_model-00001-of-00001.bin"})
    (path / "pytorch_model.bin").write_bytes(b"short")
    (path / "model.safetensors.index.json").mkdir()
    report = reknit.load(path, {"model": (state := hf.tensors(0.0))})
    assert hf.equal(state, hf.tensors(2.0))
    assert not report.notes
    import_checkpoint(path, tmp_path / "own")


def test_a_damaged_model_is_not_replaced_by_an_older_one_in_silence(tmp_path: Path) -> None:
    path = hf.model_in(tmp_path / "hf", {"model.safetensors": 2.0, "pytorch_model.bin": 1.0})
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CorruptError, match=r"model\.safetensors: ") as caught:
        reknit.open(path)
    assert str(path / "pytorch_model.bin") in str(caught.value)
    with reknit.open(path / "pytorch_model.bin") as checkpoint:
        assert hf.equal(checkpoint.read_all(["model"])["model"], hf.tensors(1.0))


def test_a_choice_among_several_models_is_refused_where_there_is_one(tmp_path: Path) -> None:
    hf.single(tmp_path, 1.0)
    for path, weights, error in (
        (tmp_path / "model.safetensors", "model.safetensors", UsageError),
        (tmp_path, "../model.safetensors", UsageError),
        (tmp_path, "", UsageError),
    ):
        with pytest.raises(error, match="weights"):
            import_checkpoint(path, tmp_path / "own", weights=weights)


def test_a_choice_that_is_not_there_names_the_files_that_are(tmp_path: Path) -> None:
    path = hf.model_in(tmp_path / "hf", {"model.safetensors": 2.0, "pytorch_model.bin": 1.0})
    (path / "model-00001-of-00002.safetensors").write_bytes(b"a part of a model")
    for weights, question in (("wrong", ""), ("model.safetensor", ": did you mean 'model.safetensors'?")):
        with pytest.raises(
            UsageError, match=f"no file of weights '{weights}'{re.escape(question)}"
        ) as caught:
            import_checkpoint(path, tmp_path / "own", weights=weights)
        names = str(caught.value.remedy).removeprefix("choose one of its files: ").split(", ")
        assert {"model.safetensors", "pytorch_model.bin"} <= {*names}
        assert "model-00001-of-00002.safetensors" not in names
    for name in ("model.safetensors", "pytorch_model.bin"):
        import_checkpoint(path, tmp_path / name, weights=name)


def test_the_parts_of_a_distributed_save_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "reknit_tiny"}')
    found = ranks.run(2, hf.save_distributed, path, 2, warm="trainers")
    with reknit.open(path) as checkpoint:
        assert hf.equal(checkpoint.read_all(["model"])["model"], found[0][0])
    with reknit.open(path / hf.SHARD) as checkpoint:
        assert hf.equal(checkpoint.read_all(["model"])["model"], found[0][0])
    (path / hf.SHARD.replace("00001", "00002", 1)).rename(path / "alone.safetensors")
    with pytest.raises(FormatError, match="the parts of tensors"):
        reknit.open(path / "alone.safetensors")
    hf.single(path, 1.0)
    with pytest.raises(FormatError, match=rf"{hf.SHARD} and model\.safetensors"):
        reknit.open(path)


@needs("transformers", "transformers")
@needs("peft", "peft")
def test_an_adapter_is_read_alone_and_beside_its_model_as_transformers_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone, beside, bare = tmp_path / "alone", tmp_path / "beside", tmp_path / "bare"
    (of_peft, of_transformers), *_ = run(hf.save_adapter, alone, [beside])
    adapter = {name: one for name, one in of_peft.items() if "lora" in name}
    with reknit.open(alone) as checkpoint:
        assert kind_of(checkpoint) == "PEFT"
        saved = checkpoint.read_all(["model"])["model"]
    assert hf.equal({name.replace(".weight", ".default.weight"): one for name, one in saved.items()}, adapter)
    assert not caplog.text
    with reknit.open(beside) as checkpoint:
        assert kind_of(checkpoint) == "Hugging Face"
        assert hf.equal(checkpoint.read_all(["adapter"])["adapter"], saved)
        base = checkpoint.read_all(["model"])["model"]
    plain = {
        name.replace(".base_layer", ""): one for name, one in of_transformers.items() if "lora" not in name
    }
    assert hf.equal(base, plain)
    assert "adapter_model.safetensors: it is not part of 'model'" in caplog.text
    # Without its configuration, transformers takes the base from the place that the adapter names.
    shutil.copytree(beside, bare)
    (bare / "config.json").unlink()
    caplog.clear()
    with reknit.open(bare) as checkpoint:
        assert kind_of(checkpoint) == "PEFT"
        assert hf.equal(checkpoint.read_all(["model"])["model"], saved)
    assert "model.safetensors: the folder is an adapter of PEFT" in caplog.text


def test_ranks_without_a_file_are_named_since_nothing_says_whether_they_had_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for lost, folder in one_by_one_in(tmp_path, [(), (2,), (2, 3)]):
        (folder / "config.json").write_text("{}")
        names = {number: f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in range(1, 5)}
        for number in {*names} - {*lost}:
            places = {f"w{number}": {"saved_offsets": [0]}}
            metadata = {"DCP_SHARDING_INFO": json.dumps(places)}
            save_file({f"w{number}": torch.ones(2)}, folder / names[number], metadata)
        caplog.clear()
        with reknit.open(folder) as checkpoint:
            assert list(checkpoint.tensors["model"]) == [
                f"w{number}" for number in names if number not in lost
            ]
        for number, name in names.items():
            assert (f"{name}: it is not there" in caplog.text) == (number in lost)


class Rates:
    """An object of a package that reknit does not import."""


def test_an_adapter_that_cannot_be_read_closes_no_model(tmp_path: Path) -> None:
    for damage, folder in one_by_one_in(tmp_path, ["cut", "empty", "cut archive", "an object"]):
        (folder / "config.json").write_text("{}")
        path = folder / f"adapter_model.{'bin' if 'a' in damage else 'safetensors'}"
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        if path.suffix == ".bin":
            torch.save(Rates() if damage == "an object" else {"w": torch.ones(2)}, path)
        else:
            save_file({"w": torch.ones(2)}, path)
        data = path.read_bytes()
        path.write_bytes(data[: 0 if damage == "empty" else len(data) if damage == "an object" else -40])
        target = {"w": torch.zeros(2)}
        reknit.load(folder, {"model": target})
        assert target["w"].tolist() == [1, 1]
        target, adapter = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
        with pytest.raises(MismatchError, match="adapter/w: saved, but it cannot be read"):
            reknit.load(folder, {"model": target, "adapter": adapter})
        assert not target["w"].any()
        problems = reknit.verify(folder).problems
        assert [problem.partition(":")[0] for problem in problems] == (
            [] if damage == "an object" else ["adapter cannot be read"]
        )


def test_tensors_of_a_dtype_that_no_tensor_has_are_named_and_the_others_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.safetensors"
    header = {
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "later": {"dtype": "float32", "shape": [1], "data_offsets": [3, 4]},
        "odd": {"dtype": "F4", "shape": [2, 1], "data_offsets": [4, 5]},
        "pairs": {"dtype": "F4", "shape": [1, 6], "data_offsets": [5, 8]},
        "plain": {"dtype": "U8", "shape": [2], "data_offsets": [8, 10]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(10)))
    with reknit.open(path) as checkpoint:
        found = checkpoint.read_all(["model"])["model"]
    assert found.keys() == {"pairs", "plain"}
    assert found["plain"].tolist() == [8, 9]
    assert found["pairs"].shape == (1, 3)
    assert all(f"model/{name}" in caplog.text for name in ("f6", "later", "odd"))
    with pytest.raises(MismatchError, match=r"model/f6: saved, but it cannot be read: .*'F6_E2M3'"):
        reknit.load(path, {"model": {"f6": torch.zeros(4)}}, strict=["!model/p*"])


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no float4")
def test_float4_has_the_shape_of_torch_whoever_wrote_the_file(tmp_path: Path) -> None:
    pairs = torch.float4_e2m1fn_x2
    weight = torch.arange(16, dtype=torch.uint8).view(2, 8).view(pairs)
    own = reknit.save(tmp_path / "own", {"model": {"w": weight}}).path
    export_hf(own, tmp_path / "hf")
    save_file({"w": weight, "other": torch.ones(2)}, tmp_path / "torch.safetensors")
    for path in (tmp_path / "hf", tmp_path / "torch.safetensors"):
        with reknit.open(path) as checkpoint:
            found = checkpoint.read("model", "w", framework="torch")
        assert found.dtype == pairs
        assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))


@needs("transformers", "transformers")
def test_no_damage_of_a_file_gives_a_wrong_value_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    run(hf.save_in_shards, path)
    with reknit.open(path) as checkpoint:
        whole = checkpoint.read_all()
    assert len(list(path.glob("*.safetensors"))) == 3
    for damage, broken in damages(path, tmp_path, kinds={REMOVED, EMPTIED, CUT, SWAPPED}):
        lost = wrong_in_silence(broken, whole)
        # Any text is a configuration, and only the program that reads it can say that it is damaged.
        assert all(name.startswith("config/") for name in lost), damage


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, str]] = [
        ("a shard is gone", r"model-00002-of-00002\.safetensors', which is not there"),
        ("a name is wrong", r"among them 'c\.weight', which model-00002"),
        ("a tensor is in two", r"two tensors 'model/a\.weight', in model-00001.* and model-00002"),
        ("nothing is named", r"names no file"),
        ("a place outside", r"unsafe path"),
    ]
    for (change, message), folder in one_by_one_in(tmp_path, cases):
        path = hf.model_in(folder / "hf", {"model.safetensors.index.json": 1.0})
        second = path / "model-00002-of-00002.safetensors"
        home = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": second.name}
        if change == "a shard is gone":
            second.unlink()
        elif change == "a name is wrong":
            home["c.weight"] = second.name
        elif change == "a tensor is in two":
            save_file(hf.tensors(1.0), second)
        else:
            home = {} if change == "nothing is named" else {"a.weight": "../x.safetensors"}
        hf.index(path, "model.safetensors.index.json", home)
        with pytest.raises(FormatError, match=message):
            reknit.open(path)


@needs("transformers", "transformers")
def test_a_checkpoint_of_the_trainer_has_the_weights_of_from_pretrained(tmp_path: Path) -> None:
    ((weights, files),) = run(hf.train, tmp_path)
    assert {"optimizer.pt", "scheduler.pt", "trainer_state.json"} < set(files)
    path = tmp_path / "checkpoint-1"
    with reknit.open(path) as checkpoint:
        assert set(checkpoint.items) == {"model", "config"}
        assert hf.equal(checkpoint.read_all(["model"])["model"], weights)
    with reknit.open(path / "optimizer.pt") as checkpoint:
        assert checkpoint.items == ("optimizer",)


@needs("transformers", "transformers")
@needs("compressed_tensors", "compressed-tensors")
def test_weights_of_compressed_tensors_load_into_a_model_that_is_compressed_alike(tmp_path: Path) -> None:
    assert run(hf.compress, tmp_path / "hf") == [True]


PAGE = Path(__file__).parents[3] / "docs/howto/other-formats.md"
OPENED, WARNED, REFUSED = "opened", "opened, with a warning", "refused"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def written(path: Path) -> dict[str, Path]:
    """Write the folders of the table on the page, by its rows, except the folders of other tests here."""

    def a_file(name: str, dtype: str, nbytes: int) -> Path:
        folder = hf.model_in(path / name, {})
        text = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, nbytes]}}).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(nbytes)
        (folder / SINGLE).write_bytes(data)
        return folder

    lost = hf.model_in(path / "lost", {INDEX: 1.0})
    (lost / "model-00002-of-00002.safetensors").unlink()
    twice = hf.model_in(path / "twice", {INDEX: 1.0})
    save_file(hf.tensors(1.0), twice / "model-00002-of-00002.safetensors")
    return {
        "one file, or an index with its shards": hf.model_in(path / "one", {INDEX: 1.0}),
        "several of these with the same model": hf.model_in(path / "same", dict.fromkeys(hf.WRITERS, 1.0)),
        "several of these, and two differ": hf.model_in(path / "two", {SINGLE: 1.0, INDEX: 2.0}),
        "an index whose shard is missing or cut": lost,
        "a tensor in two shards": twice,
        "a tensor of a dtype that torch does not have (`F6_E2M3`)": a_file("f6", "F6_E2M3", 3),
        "pairs of `F4`": a_file("f4", "F4", 2),
        "only files with a variant, such as `model.fp16.safetensors`": hf.model_in(path / "variant", {}),
        "only weights of TensorFlow or Flax": hf.model_in(path / "flax", {}),
    }


ELSEWHERE = {
    "files of the ranks (`distributed_checkpoint=True`)": OPENED,
    "files of the ranks beside another `.safetensors`": REFUSED,
    "an adapter of PEFT": OPENED,
    "an adapter beside its model and `config.json`": WARNED,
    "an adapter that is damaged beside its model": WARNED,
    "a checkpoint of the Trainer": OPENED,
    "weights of compressed-tensors": OPENED,
}
"""Rows of the table whose folders the tests above make with the programs themselves."""


def test_the_page_says_which_folders_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = dict(ELSEWHERE)
    for row, path in written(tmp_path).items():
        caplog.clear()
        try:
            reknit.open(path).close()
            found[row] = WARNED if caplog.text else OPENED
        except reknit.ReknitError:
            found[row] = REFUSED
    table = PAGE.read_text().partition("| in the folder | result |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert dict(rows) == found


def test_the_headers_of_many_shards_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = hf.many_shards(tmp_path)
    meeting, read_into = Barrier(2), LocalStorage.read_into

    def read_with_another(self: LocalStorage, path: str, start: int, buffers: list[memoryview]) -> None:
        if path in names:
            meeting.wait(60)
        read_into(self, path, start, buffers)

    monkeypatch.setattr(LocalStorage, "read_into", read_with_another)
    assert {name for _, name in read_folder(LocalStorage(tmp_path)).tensors} == set(names)


def test_two_models_of_many_tensors_are_compared_with_few_requests(tmp_path: Path) -> None:
    cases: list[tuple[int, int | None, int]] = [
        (8, None, 5 + 2 + 5),  # the five headers, the first tensors, then each file at once
        (8, 38, 5 + 2 + 5),
        (20_000, None, 5 + 2 + 2 * 64),
        (20_000, 0, 5 + 2),  # models of two trainings differ in the first tensor
    ]
    for (numel, changed, most), folder in one_by_one_in(tmp_path, cases):
        names = [f"{number:03}.weight" for number in range(201)]
        model = {name: torch.zeros(numel) for name in names}
        save_file(model, folder / "model.safetensors")
        if changed is not None:
            model[names[changed]] = torch.ones(numel)
        files = {name: f"model-{number % 4}.safetensors" for number, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: model[name] for name in names if files[name] == file}, folder / file)
        hf.index(folder, "model.safetensors.index.json", files)
        storage = MeteredStorage(LocalStorage(folder))
        found = read_folder(storage)
        assert bool(found.rivals) == (changed is not None)
        assert storage.meter.figures["read"].count <= most


def test_the_parts_of_a_distributed_save_are_compared_with_the_same_parts_of_another_file(
    tmp_path: Path,
) -> None:
    whole = torch.arange(48.0).view(6, 8)
    for rank, part in enumerate(whole.chunk(2, dim=1)):
        places = json.dumps({"w": {"saved_offsets": [0, 4 * rank]}})
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file({"w": part.contiguous()}, tmp_path / file, {"DCP_SHARDING_INFO": places})
    for different in (False, True):
        torch.save({"w": whole + different}, tmp_path / "pytorch_model.bin")
        assert bool(read_folder(LocalStorage(tmp_path)).rivals) == different
