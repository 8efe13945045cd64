from __future__ import annotations

from reknit.comm import round_errors
from reknit.comm.rank_messages import Heading, Hello
from reknit.errors import DeadlineError, ProtocolError

ROUND = Heading("job", 7, 4, "plan", "")


def test_a_round_with_one_name_failed_for_the_ranks_that_did_not_come() -> None:
    error = round_errors.failed_round(ROUND, {"'plan'": [0, 1]}, [2, 3, 5], 30)
    assert type(error) is DeadlineError
    assert error.message == "ranks 2-3, 5 did not come to round 4 ('plan') within 30 s"


def test_a_round_to_which_rank_0_came_alone_says_that_all_ranks_have_to_call() -> None:
    for present, alone in (([0], True), ([0, 1], False), ([1], False)):
        error = round_errors.failed_round(ROUND, {"'plan'": present}, [2, 3], 30)
        assert ("not rank 0 alone as with torch.save" in str(error.remedy)) == alone


def test_a_round_with_two_names_failed_for_the_ranks_in_different_places() -> None:
    error = round_errors.failed_round(ROUND, {"'plan'": [0, 1, 2], "'commit'": [3]}, [4], 30)
    assert type(error) is ProtocolError
    assert "ranks 0-2 in 'plan'; rank 3 in 'commit'; rank 4 did not come" in error.message


def test_a_round_with_a_place_for_every_rank_failed_with_a_message_that_stays_short() -> None:
    places = {f"'{rank}'": [rank] for rank in range(1000)}
    message = round_errors.failed_round(ROUND, places, [], 30).message
    assert "rank 0 in '0'; rank 1 in '1'" in message
    assert message.endswith("; and 992 places more")


def test_another_job_or_run_is_told_from_our_own() -> None:
    here = Hello("job", 7, 0, "tree")
    assert round_errors.wrong_job(3, Hello("job", 7, 3, "tree"), here) is None
    for job, run, text in [
        ("other", 7, "job 'other'"),
        ("job", 6, "an older run"),
        ("job", 8, "a newer run"),
    ]:
        error = round_errors.wrong_job(3, Hello(job, run, 3, "tree"), here)
        assert type(error) is ProtocolError
        assert text in error.message
