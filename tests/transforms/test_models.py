from __future__ import annotations

import pytest

from reknit import transforms
from reknit.integrations import model_maps


def test_the_rules_for_families_of_models_have_their_public_name() -> None:
    from reknit.transforms.models import megatron_to_hugging_face

    assert megatron_to_hugging_face is model_maps.megatron_to_hugging_face
    assert transforms.models.hugging_face_to_torchtitan is model_maps.hugging_face_to_torchtitan
    with pytest.raises(ImportError, match="nothing_of_this_name"):
        from reknit.transforms.models import nothing_of_this_name  # noqa: F401
