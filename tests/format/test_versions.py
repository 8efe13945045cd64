from __future__ import annotations

import pytest

from reknit.errors import VersionError
from reknit.format.checksum import FORMAT_VERSION, check_version


def test_every_version_up_to_the_present_one_is_read_and_others_are_refused_with_a_remedy() -> None:
    for version in range(1, FORMAT_VERSION + 1):
        check_version(version)
    for version in (-1, 0, FORMAT_VERSION + 1, 1 << 62):
        with pytest.raises(VersionError) as caught:
            check_version(version)
        assert caught.value.remedy
    with pytest.raises(VersionError, match="sparkles"):
        check_version(FORMAT_VERSION, ["sparkles"])
