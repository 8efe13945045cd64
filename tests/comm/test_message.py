from __future__ import annotations

import os
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.comm.message import (
    COMPRESS_NBYTES,
    OVERHEAD_NBYTES,
    Hello,
    Outcome,
    Parcel,
    Report,
    decode,
    encode,
    too_large,
    wire_limit,
)
from reknit.errors import ProtocolError

MIB = 1 << 20
payload_lists = st.lists(st.one_of(st.binary(max_size=40), st.just(b"same")), max_size=30)


@settings(deadline=None)
@given(payload_lists)
def test_a_parcel_gives_back_the_payloads_that_went_into_it(payloads: list[bytes]) -> None:
    assert Parcel.of(payloads).payloads(len(payloads)) == payloads


@settings(deadline=None)
@given(payload_lists, st.text(max_size=20), st.integers(0, 1 << 40))
def test_a_report_arrives_as_it_was_sent(payloads: list[bytes], name: str, number: int) -> None:
    report = Report("job", 3, number, name, Parcel.of(payloads))
    assert decode(encode(report), Report, MIB) == report
    assert report.whole


@settings(deadline=None)
@given(payload_lists)
def test_the_size_that_is_checked_before_sending_bounds_the_size_that_is_sent(payloads: list[bytes]) -> None:
    parcel = Parcel.of(payloads)
    assert len(encode(Outcome(parcel))) <= parcel.nbytes + OVERHEAD_NBYTES


def test_a_payload_for_every_rank_of_a_large_job_is_carried_once() -> None:
    message = encode(Outcome(Parcel.of([os.urandom(MIB)] * 1000)))
    assert len(message) < 1.1 * MIB


@pytest.mark.parametrize("payload", [bytes(3 * MIB), os.urandom(3 * MIB)], ids=["zeros", "noise"])
def test_a_large_message_arrives_as_it_was_sent_and_is_never_larger_than_plain(payload: bytes) -> None:
    outcome = Outcome(Parcel.of([payload]))
    message = encode(outcome)
    assert decode(message, Outcome, 4 * MIB) == outcome
    assert len(message) <= len(msgspec.msgpack.encode(outcome)) + 1


def test_a_message_above_a_mebibyte_is_compressed_and_one_below_is_not() -> None:
    assert len(encode(Outcome(Parcel.of([bytes(COMPRESS_NBYTES + 1)])))) < COMPRESS_NBYTES / 100
    assert len(encode(Outcome(Parcel.of([bytes(COMPRESS_NBYTES - 100)])))) > COMPRESS_NBYTES - 100


def test_a_small_message_that_unpacks_to_a_huge_one_is_refused() -> None:
    bomb = encode(Outcome(Parcel.of([bytes(64 * MIB)])))
    assert len(bomb) < MIB
    with pytest.raises(ProtocolError, match="larger than"):
        decode(bomb, Outcome, MIB)


def test_a_compressed_message_that_was_cut_off_is_refused() -> None:
    message = encode(Outcome(Parcel.of([bytes(2 * MIB)])))
    with pytest.raises(ProtocolError, match="cut off"):
        decode(message[:-10], Outcome, 4 * MIB)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_with_a_typed_error(noise: bytes) -> None:
    for data in (noise, b"\0" + noise, b"\1" + noise, b"\1" + zlib.compress(noise)):
        try:
            decode(data, Hello, MIB)
        except ProtocolError:
            continue
        assert msgspec.msgpack.decode(data[1:])  # by chance it was one


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), max_size=5), st.integers(0, 5))
def test_a_parcel_that_does_not_fit_its_ranks_is_refused(which: list[int], count: int) -> None:
    parcel = Parcel([b"a", b"b"], which)
    if len(which) == count and all(place in (0, 1) for place in which):
        assert len(parcel.payloads(count)) == count
    else:
        with pytest.raises(ProtocolError, match="instead of"):
            parcel.payloads(count)


@pytest.mark.parametrize(
    "body",
    [b"\x94\xa1\xff\x00\x01\x02", b"\x92\x92\x90\x90\x81\xa1e" + b"\x91" * 100_000],
    ids=["no UTF-8", "nested without end"],
)
def test_text_and_nesting_that_cannot_be_read_are_refused_like_any_noise(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read as Hello"):
        decode(b"\0" + body, Hello, MIB)
    with pytest.raises(ProtocolError, match="cannot be read as Outcome"):
        decode(b"\0" + body, Outcome, MIB)


def test_a_limit_says_how_much_was_too_much_and_what_to_do() -> None:
    assert too_large("it", 10, 10) is None
    error = too_large("it", 11, 10)
    assert error is not None
    assert "11 bytes" in error.message
    assert "max_message_nbytes" in str(error.remedy)


def test_the_limit_on_the_wire_fits_the_counters_of_grpc() -> None:
    assert wire_limit(1 << 40) == (1 << 31) - 1
