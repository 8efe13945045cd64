from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import enum
import random
import struct
import subprocess
import sys
import types
import zoneinfo
from functools import cache, partial
from itertools import product
from mmap import PAGESIZE, mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.errors import CorruptError, FormatError, StateError
from reknit.format import msgpack_reader
from reknit.format.blob_codec import decode_blobs, encode_blobs, join_blobs
from reknit.format.msgpack_reader import file_memory
from reknit.types.shard import Tagged
from tests.format.samples import Colour, Level, Outer, same, taken, values
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable


def round_trip(value: Any, **options: Any) -> Any:
    return decode_blobs(encode_blobs({"x": value}, **options), **options)["x"]


@settings(max_examples=examples(300))
@given(values)
def test_every_value_comes_back_with_its_type_and_every_bit(value: Any) -> None:
    assert same(round_trip(value), value)


@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=4))
def test_names_keep_their_order(values: dict[str, int]) -> None:
    assert list(decode_blobs(encode_blobs(values)).items()) == list(values.items())


UNUSUAL: list[Any] = [
    *(True, 1, 1.0, -0.0, 0, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 1 << 8_000_000, b"", "", None),
    *({1: 2, "1": 3, (1, "a"): 4, None: 5, False: 6}, {True: 1, 2.5: 2}, {}, [], (), set(), frozenset()),
    *(np.float32(1.5), np.int64(3), np.bool_(True), np.str_("é\0"), np.bytes_(b"a\0")),
    *(np.datetime64("NaT", "ns"), np.array(3), np.zeros((0, 3)), np.arange(6).reshape(2, 3)),
    *(np.array(["a", "bc"]), np.arange(3, dtype=">i4"), np.dtype("<M8[ns]"), np.dtype("bool")),
    *(Colour.RED, Colour.ROUGE, Level.HIGH, Outer.Inner.ONE, range(0), slice(None), bytearray(b"x")),
    *(datetime.datetime(2026, 1, 1, fold=1), datetime.datetime.max),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")),
    *(argparse.Namespace(a=1), types.SimpleNamespace(b=[1]), Tagged("t", [1]), {"a": {"b": [({1},)]}}),
    *(collections.Counter("abca"), collections.deque([1, 2], 5), collections.defaultdict(list, {1: [2]})),
    *(collections.OrderedDict([("b", 1), ("a", 2)]), complex(-0.0, float("nan"))),
    *(struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF0000000000123, 0xFFF8000000000001)),
]


def test_the_unusual_values_come_back() -> None:
    assert [value for value in UNUSUAL if not same(round_trip(value), value)] == []


def test_arrays_come_back_writable_and_row_major() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = round_trip(array)
    assert np.array_equal(found, array)
    assert found.flags.c_contiguous
    assert found.flags.writeable


def test_equal_sets_have_equal_bytes_in_every_process() -> None:
    program = (
        "from reknit.format.blob_codec import encode_blobs as e\n"
        "print(e({'x': {str(n) for n in range(50)}}).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "src"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


class Point(NamedTuple):
    x: int


class Custom(dict[str, int]):
    pass


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


class Flags(enum.Flag):
    A = 1
    B = 2


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


Lost = enum.Enum("Lost", "ONE")
KEPT, Lost = Lost, None  # type: ignore[misc, assignment]


FORMLESS: list[tuple[Any, str]] = [
    (Thing(1), "Thing"),
    (Point(1), "Point, which derives from tuple"),
    (Custom(), "Custom, which derives from dict"),
    (decimal.Decimal(1), "Decimal"),
    (np.array([None]), "object"),
    (np.zeros(2, "i4,i4"), "NumPy"),
    (np.longdouble(1), "NumPy"),
    (np.arange(2).view(np.recarray), "recarray"),
    (collections.defaultdict(lambda: 1), "factory"),
    (datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "fixed offset"),
    (Flags.A | Flags.B, "flags"),
    (KEPT.ONE, "name"),
    (1 << 9_000_000, "limit"),
    ("\ud800", "Unicode"),
    (print, "builtin"),
    (int, "type"),
    (iter([]), "iterator"),
    (memoryview(b""), "memoryview"),
    # These name the call whose result has a form.
    (np.random.default_rng(0), "save its bit_generator.state,"),
    (np.random.PCG64(0), "save its state,"),
    (np.random.RandomState(0), "the result of its get_state()"),
    (random.Random(0), "the result of its getstate()"),
    *((each, "eqx.filter") for each in (len, lambda x: x, np.exp, partial(len), cache(len), "".join)),
]


def test_a_value_without_a_form_is_refused_by_its_path_with_a_remedy() -> None:
    for value, says in FORMLESS:
        with pytest.raises(StateError) as caught:
            encode_blobs({"foo": [0, {"lr": 1, "k": (value,)}]}, item="extra")
        assert "extra/foo[1]['k'][0] cannot be saved" in caught.value.message
        assert says in str(caught.value)
        assert caught.value.remedy


def test_the_state_of_a_bit_generator_comes_back() -> None:
    generator, other = np.random.default_rng(3), np.random.default_rng(4)
    data = encode_blobs({"state": generator.bit_generator.state}, item="extra")
    other.bit_generator.state = decode_blobs(data)["state"]
    assert other.random() == generator.random()


def test_the_path_names_keys_of_every_kind_of_table() -> None:
    for container, path in [
        ({(1, 2): print}, "x[(1, 2)]"),
        (collections.OrderedDict(a=1, b=print), "x['b']"),
        (collections.defaultdict(None, {5: print}), "x[5]"),
        (collections.deque([1, print]), "x[1]"),
        (types.SimpleNamespace(a=print), "x['a']"),
        (Tagged("t", print), "x[0]"),
    ]:
        with pytest.raises(StateError) as caught:
            encode_blobs({"x": container})
        assert caught.value.message.startswith(f"{path} cannot")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(StateError, match="contains itself"):
        encode_blobs({"x": value})


WRAPPERS: list[Callable[[Any], Any]] = [
    *(lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: Tagged("t", v))
]


def test_as_deep_as_can_be_written_can_be_read() -> None:
    for wrap, leaf in product(WRAPPERS, (1, 1 << 70, np.zeros(2), [1])):
        value: Any = leaf
        deepest = None
        for _ in range(70):
            try:
                data = encode_blobs({"x": value})
            except StateError:
                break
            deepest = data
            value = wrap(value)
        else:
            pytest.fail("nothing is too deep")
        assert deepest is not None
        decode_blobs(deepest)


def test_pickle_is_used_only_where_both_sides_ask_for_it() -> None:
    value = {"plain": (1, 2), "thing": Thing(3)}
    data = encode_blobs({"x": value}, allow_pickle=True)
    with pytest.raises(FormatError, match="allow_pickle=True"):
        decode_blobs(data)
    assert decode_blobs(data, allow_pickle=True) == {"x": value}
    # values that need no pickle are not pickled
    assert encode_blobs({"x": (1, {2})}, allow_pickle=True) == encode_blobs({"x": (1, {2})})


def test_errors_of_foreign_pickling_code_are_typed() -> None:
    with pytest.raises(StateError, match="pickle refuses"):
        encode_blobs({"x": Stubborn()}, allow_pickle=True)
    data = ext(127, msgspec.msgpack.encode(b"\x80\x04garbage"))
    with pytest.raises(FormatError, match="cannot be loaded"):
        decode_blobs(data, allow_pickle=True)


def test_pickle_is_not_even_imported_without_need() -> None:
    program = (
        "import sys, builtins; real = builtins.__import__\n"
        "import reknit.format.blob_codec as b\n"
        "def guard(name, *a, **k):\n"
        "    assert name != 'pickle'\n"
        "    return real(name, *a, **k)\n"
        "builtins.__import__ = guard\n"
        "assert b.decode_blobs(b.encode_blobs({'x': (1, {2})})) == {'x': (1, {2})}\n"
    )
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": "src"}, check=True)


def ext(code: int, payload: bytes) -> bytes:
    return msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(code, payload)})


def test_an_enum_that_the_program_does_not_have_comes_back_by_name() -> None:
    for module, qualname, member in [
        ("not.imported", "Colour", "RED"),
        ("antigravity", "x", "y"),
        (__name__, "Point", "x"),
        (__name__, "nothing.there", "x"),
        (__name__, "sys.modules", "x"),
        (Colour.__module__, "Colour", "GREEN"),
        (Colour.__module__, "Colour.RED", "RED"),
        ("os", "system", "x"),
    ]:
        found = decode_blobs(ext(15, msgspec.msgpack.encode([module, qualname, member])))["x"]
        assert found == Tagged("enum", [module, qualname, member])
    assert "antigravity" not in sys.modules


class Trap(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked up")


def test_finding_an_enum_runs_no_code_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trap", Trap("trap"))
    found = decode_blobs(ext(15, msgspec.msgpack.encode(["trap", "Colour", "RED"])))["x"]
    assert isinstance(found, Tagged)


E = msgspec.msgpack.Ext


UNWRITTEN: dict[int, list[Any]] = {
    1: [5, "ab"],
    2: [[1, 1], [[]], [1, True]],
    3: [[{}]],
    4: [[1], [1, 2, 1, 3], [[], 1]],
    5: [b"\x01", 7, bytes(9), b"\x00" + b"\xff" * 8, b"\x00\x00" + b"\xff" * 9, bytes(2 << 20)],
    6: [[1, 2], [1.0]],
    7: [
        *(["<f4", [2], bytes(4)], ["<f4", [-1], b""], ["|O", [1], bytes(8)], ["<f4", [0, 1 << 62, 4], b""]),
        *(["<f4", [True], bytes(4)], ["<f4", [1] * 65, bytes(4)], ["V8", [1], bytes(8)], ["|b1", [1], b"\2"]),
        *(["f4", [1], bytes(4)], ["<U1", [1], b"\xff\xff\xff\x7f"], [4, [1], bytes(4)]),
        *(["<f4,<f4", [1], bytes(8)], None),
    ],
    8: [["<f4", bytes(3)], ["<U1", bytes(4)], ["U", b""], ["", b""]],
    9: [5, "object", "|O"],
    10: [
        *([2026, 1, 1, 0, 0, 0, 0, 0], [2026, 13, 1, 0, 0, 0, 0, 0, None], [True] * 8 + [None]),
        *([1 << 63, 1, 1, 0, 0, 0, 0, 0, None], [2026, 1, 1, 0, 0, 0, 0, 2, None]),
        [2026, 1, 1, 0, 0, 0, 0, 0, [1 << 60, None]],
    ],
    11: [[1, 1], [0, 1, 1]],
    12: [[24, 0, 0, 0, 0, None], [0, 0, 0, 0, 0, [0, 1]]],
    13: [[1 << 62, 0, 0]],
    14: [["mac", False, ""], ["posix", 1, ""]],
    15: [["a", "b"], [1, 2, 3]],
    16: [[1]],
    17: [[], ["eval"], [0], ["list", 1]],
    18: [[[], 1]],
    19: [[], [1, 1, 2], [-1], ["a"]],
    20: [[1, 2], ["a"]],
    21: [5],
    22: [[0, 1, 0], [0, 1], [0, 1, 1.0]],
    23: [[0]],
    24: ["a"],
    25: [[1, 2], ["a"]],
    26: [
        [],
        [E(16, b"\x90"), []],
        [{}, {}],
        [E(16, b"\x90"), {"items": 1}],
        [E(16, b"\x90"), E(4, b"\x92\1\1")],
    ],
    **{0: [1], 99: [None], -1: [0], 126: [b""], 127: [b""]},
}


def test_an_extension_that_no_writer_writes_is_refused() -> None:
    files = {
        (code, repr(payload)[:99]): ext(code, msgspec.msgpack.encode(payload))
        for code, payloads in UNWRITTEN.items()
        for payload in payloads
    }
    assert taken(files, decode_blobs, FormatError) == []


def test_a_file_that_is_no_map_of_names_is_refused() -> None:
    files = b"", b"\x90", b"\xc0", b"\x81\x01\x01", b"\x80\x80", b"\x82\xa1a\xc0\xa1a\xc0"
    assert taken(files, decode_blobs, CorruptError) == []


def test_keys_that_all_collide_are_refused_instead_of_taking_hours() -> None:
    colliding = [n * ((1 << 61) - 1) for n in range(1, 30_000)]
    big = [k.to_bytes(k.bit_length() // 8 + 1, "big") for k in colliding[8:]]
    payload = msgspec.msgpack.encode([E(5, msgspec.msgpack.encode(raw)) for raw in big])
    with pytest.raises(CorruptError, match="hash"):
        decode_blobs(ext(2, payload))


SAMPLE = encode_blobs(
    {
        "rng": {"state": np.arange(6, dtype="u4"), "pos": 3, "gauss": None, "big": 1 << 100},
        "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        "many": [(1, 2.5), {1: "a"}, {"b"}, frozenset({3}), Colour.RED, range(3), np.float32(2), 1j],
        "args": argparse.Namespace(lr=1e-3, path=__import__("pathlib").PurePosixPath("a/b")),
        "more": [collections.deque([1], 3), collections.defaultdict(int, a=1), Tagged("t", slice(1, 2))],
    }
)


@settings(max_examples=examples(1000))
@given(st.data())
def test_a_changed_byte_gives_values_or_a_typed_error(data: st.DataObject) -> None:
    bad = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        decode_blobs(bytes(bad))


def test_a_file_of_blobs_cut_short_anywhere_is_refused() -> None:
    assert taken((SAMPLE[:length] for length in range(len(SAMPLE))), decode_blobs, CorruptError) == []


def test_a_file_that_no_reader_would_take_for_its_many_lists_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(msgpack_reader, "_BASE_STRUCTURE", 1 << 20)
    monkeypatch.setattr(msgpack_reader, "_STRUCTURE_PER_BYTE", 1)
    parts = [encode_blobs({str(n): [[]] * 8_000}) for n in range(3)]
    assert len(decode_blobs(join_blobs(parts[:1]))["0"]) == 8_000
    with pytest.raises(StateError, match="too many lists") as caught:
        join_blobs(parts)
    assert "tensors or arrays" in str(caught.value.remedy)


LARGE = {
    "bytes": bytes(range(256)) * (5 << 12) + b"end",
    "bytearray": bytearray(bytes(range(256)) * (5 << 12)),
    "text": "aé\u20ac" * (1 << 20) + "\U0001f600",
    "array": np.arange(5 << 19, dtype=np.int16).reshape(5, -1),
    "flags": np.ones(5 << 20, bool),
    "texts": np.full(1 << 18, "\U0010ffffx"),
    "list": [b"x" * (1 << 20), "y" * (1 << 20), 1, np.ones(1 << 18), b"z"] * 6,
    "nested": {"t": Tagged("x", {"a": np.ones((0, 3)), "b": b"1" * (1 << 20)}), "u": bytearray(5 << 20)},
}


def test_large_values_come_back_from_bytes_and_from_memory_that_is_given_back() -> None:
    for kind, value in LARGE.items():
        data = encode_blobs({"x": value, "after": [kind]})
        memory: Any = file_memory(len(data))
        memory[:] = data
        for source in (data, memory):
            found = decode_blobs(source)
            assert same(found["x"], value), kind
            assert found["after"] == [kind]
            assert not isinstance(value, np.ndarray) or found["x"].flags.writeable
        if isinstance(memory, mmap) and len(data) > 4 << 20:
            assert memory[:PAGESIZE] == bytes(PAGESIZE)


def test_large_text_and_flags_with_wrong_bytes_are_damage() -> None:
    text, flags = (bytearray(encode_blobs({"x": LARGE[kind]})) for kind in ("text", "flags"))
    text[len(text) // 2] = 0xFF
    flags[len(flags) // 2] = 2
    with pytest.raises(CorruptError, match="not valid UTF-8"):
        decode_blobs(text)
    with pytest.raises(CorruptError, match="bytes other than 0 and 1"):
        decode_blobs(flags)
    broken = encode_blobs({"x": "a" * (1 << 20)})[:-1] + b"\xc3"  # the first byte of two
    with pytest.raises(CorruptError, match="not valid UTF-8"):
        decode_blobs(broken)
