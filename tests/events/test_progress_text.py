from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reknit.events.phase import ActionProgress
from reknit.events.progress import STALLED_S, amount, describe

GIB = 1 << 30


def line(moved: int, expected: int, speed: float | None = None, idle_s: float = 0.0, *doing: str) -> str:
    return describe("load", "ck/step_5", ActionProgress(moved, expected, idle_s, doing), speed, None)


def test_a_line_says_what_has_come_and_how_long_it_takes() -> None:
    for reported, expected in [
        (
            line(int(3.2 * GIB), int(7.8 * GIB), 1.9 * GIB),
            "load from ck/step_5: 41 % (3.2 of 7.8 GiB), 1.9 GiB/s, about 2 s left",
        ),
        (line(0, 100), "load from ck/step_5: 0 % (0 of 100 B)"),
        (line(0, 0, None, 12.2, "open"), "load from ck/step_5: open, for 12 s"),
        (line(0, 0, None, 3), "load from ck/step_5: waiting, for 3 s"),
        (line(5, 10, 1.0, STALLED_S + 10), "load from ck/step_5: 50 % (5 of 10 B), no byte for 20 s"),
        (line(5, 10, 0.0), "load from ck/step_5: 50 % (5 of 10 B)"),
        (line(10, 10, 1.0, 99, "commit"), "load from ck/step_5: 100 % (10 of 10 B), commit"),
        (line(12, 10, 1.0, 99), "load from ck/step_5: 100 % (10 of 10 B), waiting"),
        (line(0, 7200, 1.0), "load from ck/step_5: 0 % (0.0 of 7.0 KiB), 1 B/s, about 2 h 0 min left"),
        (line(0, 300, 1.0), "load from ck/step_5: 0 % (0 of 300 B), 1 B/s, about 5 min left"),
    ]:
        assert reported == expected


def test_a_save_goes_to_a_path_whose_letters_cannot_steer_a_terminal() -> None:
    reported = describe("save", "a\x1b[2Jb\nc", ActionProgress(0, 0, 0.0, ()), None, None)
    assert reported == "save to a?[2Jb?c: waiting, for 0 s"


@given(st.text(max_size=90), st.integers(1, 120), st.integers(0, 9 * GIB), st.none() | st.floats(0, 1e12))
def test_a_line_fits_and_keeps_the_end_of_its_path(
    path: str, width: int, moved: int, speed: float | None
) -> None:
    standing = ActionProgress(moved, 8 * GIB, 0.0, ())
    whole = describe("load", path, standing, speed, None)
    reported = describe("load", path, standing, speed, width)
    assert len(reported) <= width
    if len(whole) <= width:
        assert reported == whole
    elif width >= len(whole) - len(path) + 3:
        assert reported.startswith("load from ...")
        assert whole.endswith(reported.removeprefix("load from ..."))


def test_bytes_are_told_in_the_largest_unit_that_fits() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", (1 << 20) - 1: "1.0 MiB"}
    texts |= {5 << 30: "5.0 GiB", 1 << 70: "1048576.0 PiB"}
    assert {nbytes: amount(nbytes) for nbytes in texts} == texts
