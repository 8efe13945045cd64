"""Files of transformers load into live models with other names and shapes, by the model's own table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests import ranks
from tests.integrations.hugging_face import converted
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("transformers", "transformers")
run = partial(ranks.run, warm="trainers")


def test_files_of_a_model_load_into_it_whatever_its_table_of_conversions_says(tmp_path: Path) -> None:
    (found,) = run(1, converted.loaded, list(converted.FAMILIES), tmp_path, joined=False)
    assert found == {family: (family != "nothing", True) for family in converted.FAMILIES}


def test_an_import_and_a_compiled_model_keep_the_way_to_the_names_of_the_model(tmp_path: Path) -> None:
    assert run(1, converted.imported_and_wrapped, tmp_path, joined=False) == [[True, True, True]]


def test_each_rank_reads_its_parts_of_stacked_experts(tmp_path: Path) -> None:
    assert run(2, converted.sharded, tmp_path) == [True, True]


def test_an_operation_that_does_more_than_move_boxes_is_named_with_another_way(tmp_path: Path) -> None:
    (error,) = run(1, converted.refused, tmp_path, joined=False)
    assert "model.layers.0.mlp.gate_proj.weight by its operation Interleave" in error
    assert "from_pretrained" in error
