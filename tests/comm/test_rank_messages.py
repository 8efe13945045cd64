from __future__ import annotations

import os

import msgspec
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.comm.rank_messages import (
    COMPRESS_NBYTES,
    OVERHEAD_NBYTES,
    Heading,
    Hello,
    News,
    Outcome,
    Parcel,
    Reply,
    Report,
    decode,
    encode,
    too_large,
)
from reknit.errors import ProtocolError

MIB = 1 << 20
ROUND = Heading("job", 7, 3, "plan", "save 1")
payload_lists = st.lists(st.one_of(st.binary(max_size=40), st.just(b"same")), max_size=30)


@given(payload_lists)
def test_a_parcel_gives_back_the_payloads_that_went_into_it(payloads: list[bytes]) -> None:
    assert Parcel.of(payloads).payloads(len(payloads)) == payloads


@given(payload_lists, st.text(max_size=20), st.integers(0, 1 << 40))
def test_a_report_arrives_as_it_was_sent(payloads: list[bytes], name: str, number: int) -> None:
    report = Heading("job", 7, number, name, "save 1").report(3, Parcel.of(payloads))
    assert decode(encode(report), Report, MIB) == report
    assert report.whole


@given(payload_lists)
def test_the_size_that_is_checked_before_sending_bounds_the_size_that_is_sent(payloads: list[bytes]) -> None:
    parcel = Parcel.of(payloads)
    assert len(encode(ROUND.outcome(parcel))) <= parcel.nbytes + OVERHEAD_NBYTES


def test_a_payload_for_every_rank_of_a_large_job_is_carried_once() -> None:
    message = encode(ROUND.outcome(Parcel.of([os.urandom(MIB)] * 1000)))
    assert len(message) < 1.1 * MIB


def test_a_large_message_arrives_as_it_was_sent_and_is_never_larger_than_plain() -> None:
    for payload in (bytes(3 * MIB), os.urandom(3 * MIB)):
        outcome = ROUND.outcome(Parcel.of([payload]))
        message = encode(outcome)
        assert decode(message, Outcome, 4 * MIB) == outcome
        assert len(message) <= len(msgspec.msgpack.encode(outcome)) + 1


def test_a_large_message_is_compressed_and_a_small_one_is_not() -> None:
    large, small = (encode(ROUND.outcome(Parcel.of([bytes(COMPRESS_NBYTES + more)]))) for more in (1, -100))
    assert len(large) < COMPRESS_NBYTES / 100
    assert len(small) > COMPRESS_NBYTES - 100


def test_a_small_message_that_unpacks_to_a_huge_one_is_refused_before_it_is_unpacked() -> None:
    bomb = encode(ROUND.outcome(Parcel.of([bytes(64 * MIB)])))
    assert len(bomb) < MIB
    with pytest.raises(ProtocolError, match="larger than"):
        decode(bomb, Outcome, MIB)


def test_a_compressed_message_that_lies_about_its_size_or_was_cut_off_is_refused() -> None:
    honest = encode(ROUND.outcome(Parcel.of([bytes(2 * MIB)])))
    for claim in (0, 10, 3 * MIB, 1 << 63):
        with pytest.raises(ProtocolError, match=r"larger than|truncated"):
            decode(honest[:1] + claim.to_bytes(8, "little") + honest[9:], Outcome, 4 * MIB)
    for keep in (1, 5, 9, 20, -10):
        with pytest.raises(ProtocolError, match="truncated"):
            decode(honest[:keep], Outcome, 4 * MIB)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_with_a_typed_error(noise: bytes) -> None:
    zstd, size = pa.Codec("zstd"), len(noise).to_bytes(8, "little")
    for data in (noise, b"\0" + noise, b"\1" + noise, b"\1" + size + zstd.compress(noise, asbytes=True)):
        try:
            decode(data, Hello, MIB)
        except ProtocolError:
            continue
        assert msgspec.msgpack.decode(data[1:])  # by chance it was one


@given(st.lists(st.integers(-5, 5), max_size=5), st.integers(0, 5))
@example([-1], 1)
@example([0, 2], 2)
def test_a_parcel_that_does_not_fit_its_ranks_is_refused(which: list[int], count: int) -> None:
    parcel = Parcel([b"a", b"b"], which)
    if len(which) == count and all(place in (0, 1) for place in which):
        assert len(parcel.payloads(count)) == count
    else:
        with pytest.raises(ProtocolError, match="instead of"):
            parcel.payloads(count)


def test_text_and_nesting_that_cannot_be_read_are_refused_like_any_noise() -> None:
    for body in (b"\x94\xa1\xff\x00\x01\x02", b"\x91\x81\xa1e" + b"\x91" * 100_000):
        with pytest.raises(ProtocolError, match="cannot be read as Hello"):
            decode(b"\0" + body, Hello, MIB)
        with pytest.raises(ProtocolError, match="cannot be read as Reply"):
            decode(b"\0" + body, Reply, MIB)


def test_a_limit_says_how_much_was_too_much_and_what_to_do() -> None:
    assert too_large("it", 10, 10) is None
    error = too_large("it", 11, 10)
    assert error is not None
    assert "11 bytes" in error.message
    assert "max_message_nbytes" in str(error.remedy)


def test_what_a_message_says_of_its_round_arrives_with_it() -> None:
    again = decode(encode(ROUND.report(2, places={"'plan'": [2]}, missing=[5])), Report, MIB)
    assert (again.job, again.generation, again.number) == ("job", 7, 3)
    assert again.label == "round 3 ('plan' of save 1)"
    assert not again.whole
    assert Heading("job", 7, 0, "plan", "").label == "round 0 ('plan')"
    hello, news = Hello("job", 7, 3, "digest"), News("job", 7, 3, ProtocolError("gone").to_wire())
    assert (decode(encode(hello), Hello, MIB), decode(encode(news), News, MIB)) == (hello, news)
