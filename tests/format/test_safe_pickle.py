"""Pickles of other programs: names in the table are built, and every other name is refused."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import pickle
import resource
import struct
import subprocess
from collections import Counter, OrderedDict, deque
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from reknit.errors import FormatError
from reknit.integrations.formats.pickles import (
    MAX_EQUAL_HASHES,
    MOST_MEMBERS,
    Global,
    PickledObject,
    Unreadable,
    Vocabulary,
    read_pickle,
)
from reknit.integrations.formats.torch_values import TORCH, neutral, neutral_keys
from tests.format.samples import taken
from tests.running.examples import is_night


def read(data: bytes) -> Any:
    return read_pickle(data, TORCH)


def test_plain_values_are_read_as_they_were() -> None:
    values: list[Any] = [
        None,
        (),
        [1, -2, 1 << 70, 2.5, "text", b"bytes", True],
        {"a": {"b": [(), (1,), (1, 2, 3, 4)]}, 3: None},
        {"x", "y"},
        OrderedDict(a=1, b=[2]),
    ]
    for value, protocol in itertools.product(values, (2, 3, 4, 5)):
        assert read(pickle.dumps(value, protocol)) == value


def test_values_of_numpy_and_torch_become_neutral() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    for protocol in (2, 4):
        read = read_pickle(
            pickle.dumps([array, np.float32(1.5), torch.bfloat16, torch.Size([2, 3])], protocol), TORCH
        )
        assert np.array_equal(neutral(read[0]), array)
        assert read[1] == np.float32(1.5)
        assert neutral(read[2]).value == "bfloat16"
        assert read[3] == (2, 3)


def test_keys_may_be_dtypes_and_pairs_of_them_and_become_texts() -> None:
    keys = {(torch.bfloat16, torch.float32): [4], torch.int8: 1, (1, "a"): 2, "plain": 3}
    texts = {"(torch.bfloat16, torch.float32)": [4], "torch.int8": 1, (1, "a"): 2, "plain": 3}
    for protocol in (2, 4):
        assert neutral_keys(read(pickle.dumps(keys, protocol))) == texts
        both = read(pickle.dumps({torch.int8: 1, "torch.int8": 2}, protocol))
        with pytest.raises(FormatError, match="a name and its text are keys"):
            neutral_keys(both)


def test_keys_and_members_of_sets_may_be_any_short_value() -> None:
    numbers = 1.5, 1 + 2j, 1 << 62, np.int64(3)
    others = datetime.date(2026, 1, 2), (1, ("a", (2.5, None))), frozenset({1, "a"}), PurePosixPath("a/b")
    for key, protocol in itertools.product((*numbers, *others), (2, 4)):
        value = {key: 1, "text": {key}, "fixed": frozenset({key})}
        assert read(pickle.dumps(value, protocol)) == value


def test_a_table_may_have_any_number_of_keys_unless_their_hashes_are_equal() -> None:
    for protocol in (2, 4):
        honest: dict[Any, int] = {(number, "a"): number for number in range(3000)}
        honest |= {number + 0.5: number for number in range(3000)}
        assert read(pickle.dumps(honest, protocol)) == honest
        same = [{(2.5, "a"): number} for number in range(MAX_EQUAL_HASHES + 9)]
        assert read(pickle.dumps(same, protocol)) == same
        for members in range(MAX_EQUAL_HASHES - 1, MAX_EQUAL_HASHES + 2):
            equal = {(1 + number * ((1 << 61) - 1), 2): 0 for number in range(members)}
            assert len({*map(hash, equal)}) == 1
            if members <= MAX_EQUAL_HASHES:
                assert read(pickle.dumps(equal, protocol)) == equal
            else:
                with pytest.raises(FormatError, match="keys with one hash"):
                    read(pickle.dumps(equal, protocol))


def test_a_name_has_at_most_a_thousand_characters() -> None:
    for split, over in itertools.product((0, 1, 500, 1000), (0, 1)):
        data = b"c" + b"m" * split + b"\n" + b"n" * (1000 + over - split) + b"\n."
        with pytest.raises(FormatError) as caught:
            read(data)
        assert ("a name of more than 1000 characters" in str(caught.value)) == bool(over)


def test_a_pickle_that_ends_anywhere_is_damaged() -> None:
    data = pickle.dumps({(torch.bfloat16, n): [n, 2.5, "text" * 99, 1 << 40] for n in range(300)}, 2)
    assert taken((data[:nbytes] for nbytes in range(0, len(data), 31)), read, FormatError) == []


class Evil:
    """An object whose pickle makes a folder."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


DEEP = 200_000


def hostile(canary: Path) -> dict[str, bytes]:
    """Return pickles that would run code, or take all memory."""
    folder = str(canary).encode()
    text = b"X" + struct.pack("<I", len(folder)) + folder
    made = b"ctorch\nSize\n"
    return {
        "a call": pickle.dumps(Evil(os.mkdir, str(canary)), 2),
        "a call by names on the stack": pickle.dumps(Evil(os.mkdir, str(canary)), 4),
        "a call beside data": pickle.dumps({"w": 1, "x": Evil(os.mkdir, str(canary))}, 2),
        "a call of eval": pickle.dumps(Evil(eval, f"__import__('os').mkdir({str(canary)!r})"), 2),
        "an old instance": b"(" + text + b"ios\nmkdir\n.",
        "an old object": b"(cos\nmkdir\n" + text + b"o.",
        "an extension": b"\x80\x02\x82\x01.",
        "a new object": b"\x80\x02cos\nmkdir\n" + text + b"\x85\x81.",
        "a new object with names": b"\x80\x04cos\nmkdir\n" + text + b"\x85}\x92.",
        "an attribute of an allowed name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
        "a state for a name": b"\x80\x02" + made + b"}X\x01\0\0\0aNsb.",
        "a call of a result": b"\x80\x02" + made + b")\x85R)R.",
        "a call of a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
        "a name of getattr": b"\x80\x02cbuiltins\ngetattr\n.",
        "a call of a prepared call": b"\x80\x02cfunctools\npartial\ncos\nmkdir\n\x85R" + text + b"\x85R.",
        "a memo bomb": b"\x80\x02Nr\xff\xff\xff\x7fr\xff\xff\xff\xff0h\x00.",
        "a call in a reduction": pickle.dumps(
            [1, Evil(functools.reduce, os.mkdir, [str(canary), str(canary)])], 2
        ),
        "a call of a class that runs programs": pickle.dumps([1, Evil(subprocess.Popen, ["true"])], 2),
        "a call of a name of Python 2": b"\x80\x02](K\x01ccommands\ngetoutput\n" + text + b"\x85Re.",
        "an open file": pickle.dumps([1, Evil(open, str(canary), "w")], 4),
        "a long name": b"\x80\x04X\x06\0\0\0typingX\xff\xff\0\0" + b"a" * 0xFFFF + b"\x93.",
        "an array of bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "a buffer outside": b"\x80\x05\x97.",
        "a text beyond the end": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc",
        "a frame beyond the end": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N",
        "an array of zeros": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x20\x85R.",
        "a table of many": b"\x80\x02ccollections\nOrderedDict\ncbuiltins\nlist\nN\x86R.",
        "an empty stack": b"\x80\x020000.",
        "items of nothing": b"\x80\x02(u.",
        "items of a number": b"\x80\x02K\x01(NNu.",
        "no end": b"\x80\x02]",
        "nothing": b"",
        "a persistent name": b"Pabc\n.",
        "data outside": b"\x80\x02NQ.",
        "a deep key": b"\x80\x04})" + b"\x85" * DEEP + b"Ns.",
        "a deep key of a set": b"\x80\x04\x8f()" + b"\x85" * DEEP + b"\x90.",
        "a deep member of a fixed set": b"\x80\x04()" + b"\x85" * DEEP + b"\x91.",
        "a deep argument": b"\x80\x04ctorch\nSize\n)" + b"\x85" * DEEP + b"R.",
        "a deep identifier": b"\x80\x04)" + b"\x85" * DEEP + b"Q.",
        "keys of equal hashes": b"\x80\x02}("
        + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(5000))
        + b"u.",
    }


def test_a_hostile_pickle_is_refused_at_once_and_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert taken(hostile(canary), read, FormatError) == []
    assert not canary.exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_the_refused_name_is_in_the_message() -> None:
    with pytest.raises(FormatError, match=r"posix\.mkdir, which reknit neither imports nor runs"):
        read(pickle.dumps(Evil(os.mkdir, "/nowhere/a"), 2))
    with pytest.raises(FormatError, match="opcode INST"):
        read_pickle(b"(ios\nmkdir\n.", TORCH)


def test_only_a_few_arguments_of_a_call_are_looked_at() -> None:
    words = Vocabulary({**TORCH.builders, "made.of": lambda *args: len(args)}, families=("argparse.",))
    for num in (0, 1, MOST_MEMBERS, MOST_MEMBERS + 1):
        args = b"(" + b"X\x01\0\0\0a" * num + b"t"
        made, called = read_pickle(b"\x80\x02(cargparse\nA\n" + args + b"Rcmade\nof\n" + args + b"Rt.", words)
        assert isinstance(made, PickledObject)
        assert len(made.args) == num
        if num <= MOST_MEMBERS:
            assert called == num
    assert called == Unreadable(f"a pickle calls made.of with {num} arguments")
    typed = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nctorch\nTensor\n"
    with pytest.raises(FormatError, match="a tensor of the class 'torch"):
        read(b"\x80\x02" + typed + args + b"NtR.")
    with pytest.raises(FormatError, match="impossible shape"):
        read(b"\x80\x02ctorch\nSize\n((" + b"K\x01" * num + b"ttR.")


def _arguments() -> dict[str, bytes]:
    """Return the opcodes of large arguments of calls, by kind."""
    members = b"".join(b"K" + bytes([number]) for number in range(200))
    text = b"X" + struct.pack("<I", 4000) + b"a" * 4000
    return {
        "text": text,
        "bytes": b"B" + struct.pack("<I", 4000) + b"a" * 4000,
        "list": b"](" + members + b"e",
        "tuple": b"(" + members + b"t",
        "table": b"}(" + members + b"u",
        "set": b"\x8f(" + members + b"\x90",
        "fixed set": b"(" + members + b"\x91",
        "list in a list": b"](](" + members + b"ee",
        "text in a tuple": text + b"\x85",
        "table in a tuple": b"}(" + members + b"u\x85",
    }


BESIDE = {
    "nothing": b"N",
    "a number": b"K\x01",
    "an encoding": b"X\x06\0\0\0latin1",
    "a function": b"c_codecs\nencode\n",
    "a class": b"ctorch\nTensor\n",
}


def _repeated_call(name: str, argument: bytes, beside: tuple[str, ...], place: int, num: int) -> bytes:
    """Return a pickle of an argument, and of the results of `num` calls with it among others."""
    args = [BESIDE[other] for other in beside]
    args.insert(place, b"h\x00")
    module, _, last = name.rpartition(".")
    called = f"c{module}\n{last}\n".encode() + b"(" + b"".join(args) + b"tR"
    return b"\x80\x04" + argument + b"q\x000](h\x00" + called * num + b"e."


def _new_size(value: Any, known: dict[int, Any]) -> int:
    """Return the number of members and characters of a value that are not in memory already."""
    if id(value) in known:
        return 0
    known[id(value)] = value
    size = len(value) if isinstance(value, str | bytes) else 1
    if isinstance(value, dict | list | tuple | set | frozenset):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        size += sum(1 + _new_size(one, known) for one in inside)
    return size


def test_no_function_of_the_table_copies_a_large_argument_again_and_again() -> None:
    fillers = [others for num in range(3) for others in itertools.product(BESIDE, repeat=num)]
    calls = itertools.product(sorted(TORCH.builders), _arguments().values(), fillers)
    for name, argument, beside in calls if is_night() else itertools.islice(calls, 0, None, 3):
        for place in range(len(beside) + 1):
            try:
                value, made = read(_repeated_call(name, argument, beside, place, 1))
            except FormatError:
                continue
            known: dict[int, Any] = {}
            _new_size(value, known)
            if _new_size(made, known) > 100:
                with pytest.raises(FormatError, match=f"repeats calls such as {name} with large arguments"):
                    read(_repeated_call(name, argument, beside, place, 100))


def test_honest_pickles_may_call_as_often_as_they_like() -> None:
    for num, protocol in itertools.product((0, 1, 600), (2, 4, 5)):
        value = [
            {
                "counted": Counter({f"word {number}": number, "and": 2}),
                "last": deque(range(5), maxlen=9),
                "bytes": (b"\xff" * 9, bytearray(b"abc" * number)),
                "sets": ({number, "a"}, frozenset({number}), set[int]()),
                "shape": torch.Size([number, 2, 3, 4]),
                "at": Path(f"/data/images/{number}.jpg"),
                "numpy": (np.float32(number), np.str_("abc")),
            }
            for number in range(num)
        ]
        assert read(pickle.dumps(value, protocol)) == [{**one, "last": [*range(5)]} for one in value]


def test_a_deep_pickle_is_read_without_recursion() -> None:
    depth = 20_000
    value = read(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_a_class_of_a_family_becomes_its_name_and_state() -> None:
    words = Vocabulary({}, families=("argparse.",))
    made = read_pickle(
        b"\x80\x02cargparse\nNamespace\n)\x81}U\x01aK\x01sb.".replace(b"U\x01a", b"X\x01\0\0\0a"), words
    )
    assert isinstance(made, PickledObject)
    assert (made.name, made.args, made.field("a")) == ("argparse.Namespace", (), 1)
    with pytest.raises(FormatError, match="has no b"):
        made.field("b")
    assert read_pickle(b"\x80\x02cargparse\nNamespace\n.", words) == Global("argparse.Namespace")
