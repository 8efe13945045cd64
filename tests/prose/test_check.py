"""The check of prose: offences are noticed, and plain sentences pass."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from tests.prose import check

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROWS = re.findall(
    r"^\|(?: [123]\. [^|]*)? \| ([^|]+) \| ([^|]+) \|$",
    (check.ROOT / "docs/contributing/plain-english.md").read_text(encoding="utf-8"),
    re.M,
)


def test_the_examples_of_the_rules_are_told_apart() -> None:
    assert len(ROWS) == 7
    for before, after in ROWS:
        assert list(check.offences(f'def f():\n    """{before}"""')) != []
        assert list(check.offences(f'def f():\n    """{after}"""')) == []


def test_comments_messages_names_and_long_sentences_count_and_plain_text_passes() -> None:
    for source in (
        "# One file of those\n# that are missing\n",
        "raise ValueError(f'{name!r} is no path of this')",
        "all_told = 1",
        "class ToldAlready: pass",
        f"# {'word ' * 31}",
    ):
        assert len(list(check.offences(source))) == 1, source
    for source in (
        "# There is no file, and it is no longer needed.",
        '"""What is read?"""',
        "PROGRAM = 'what\\n is this for'",
    ):
        assert list(check.offences(source)) == [], source


def test_a_number_may_fall_and_never_rises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "baseline.json").write_text('{"src/reknit/engine": 2}')
    folder = tmp_path / "src/reknit/engine/saving"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("# Return what there is\n")
    assert check.main([]) == 0
    assert check.main(["--lower"]) == 0
    assert json.loads((tmp_path / "baseline.json").read_text()) == {"src/reknit/engine": 1}
    (folder / "b.py").write_text("# Return what there is\n")
    assert check.main([]) == 1
    assert check.main(["--lower"]) == 1
