from __future__ import annotations

import pytest

from reknit.errors import VersionError
from reknit.format.versions import FORMAT_VERSION, check_version


def test_every_version_up_to_the_present_one_is_read() -> None:
    for version in range(1, FORMAT_VERSION + 1):
        check_version(version)


@pytest.mark.parametrize("version", [-1, 0, FORMAT_VERSION + 1, 1 << 62])
def test_an_unknown_version_is_refused_with_a_remedy(version: int) -> None:
    with pytest.raises(VersionError) as caught:
        check_version(version)
    assert caught.value.remedy


def test_an_unknown_feature_is_refused_by_name() -> None:
    with pytest.raises(VersionError, match="sparkles"):
        check_version(FORMAT_VERSION, ["sparkles"])
