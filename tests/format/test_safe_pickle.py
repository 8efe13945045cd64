"""Pickles of other programs: names in the table are built, and every other name is refused."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from reknit.errors import FormatError
from reknit.format.foreign.safe_pickle import (
    MAX_TUPLE_KEYS,
    MOST_MEMBERS,
    Global,
    PickledObject,
    Unreadable,
    Vocabulary,
    neutral_keys,
    read_pickle,
)
from reknit.format.foreign.torch_values import TORCH, neutral

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        [1, -2, 1 << 70, 2.5, "text", b"bytes", True],
        {"a": {"b": [(), (1,), (1, 2, 3, 4)]}, 3: None},
        {"x", "y"},
        OrderedDict(a=1, b=[2]),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_they_were(value: Any, protocol: int) -> None:
    read = read_pickle(pickle.dumps(value, protocol), TORCH)
    assert read == value


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


@pytest.mark.parametrize("protocol", [2, 4])
def test_keys_may_be_dtypes_and_pairs_of_them_and_become_texts(protocol: int) -> None:
    pair = torch.bfloat16, torch.float32
    read = read_pickle(pickle.dumps({pair: [4], torch.int8: 1, (1, "a"): 2, "plain": 3}, protocol), TORCH)
    assert neutral_keys(read) == {
        "(torch.bfloat16, torch.float32)": [4],
        "torch.int8": 1,
        (1, "a"): 2,
        "plain": 3,
    }
    both = read_pickle(pickle.dumps({torch.int8: 1, "torch.int8": 2}, protocol), TORCH)
    with pytest.raises(FormatError, match="a name and its text are keys"):
        neutral_keys(both)
    many = {(torch.int8, number): 0 for number in range(MAX_TUPLE_KEYS + 1)}
    with pytest.raises(FormatError, match="too many keys"):
        read_pickle(pickle.dumps(many, protocol), TORCH)


def test_a_pickle_that_ends_anywhere_is_damaged() -> None:
    data = pickle.dumps({(torch.bfloat16, n): [n, 2.5, "text" * 99, 1 << 40] for n in range(300)}, 2)
    for nbytes in range(0, len(data), 7):
        with pytest.raises(FormatError):
            read_pickle(data[:nbytes], TORCH)


class Evil:
    """An object whose pickle makes a folder."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


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
        "a deep key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
        "a deep key of a set": b"\x80\x04\x8f()" + b"\x85" * 1_000_000 + b"\x90.",
        "a deep member of a fixed set": b"\x80\x04()" + b"\x85" * 1_000_000 + b"\x91.",
        "a deep argument": b"\x80\x04ctorch\nSize\n)" + b"\x85" * 1_000_000 + b"R.",
        "a deep identifier": b"\x80\x04)" + b"\x85" * 1_000_000 + b"Q.",
        "keys of equal hashes": b"\x80\x02}("
        + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(5000))
        + b"u.",
    }


@pytest.mark.parametrize("name", hostile(io.__file__))  # type: ignore[arg-type]
def test_a_hostile_pickle_is_refused_at_once_and_runs_nothing(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(FormatError):
        read_pickle(hostile(canary)[name], TORCH)
    assert not canary.exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    del began


def test_the_refused_name_is_in_the_message() -> None:
    with pytest.raises(FormatError, match=r"posix\.mkdir, which reknit neither imports nor runs"):
        read_pickle(pickle.dumps(Evil(os.mkdir, "/nowhere/a"), 2), TORCH)
    with pytest.raises(FormatError, match="opcode INST"):
        read_pickle(b"(ios\nmkdir\n.", TORCH)


@pytest.mark.parametrize("num", [0, 1, MOST_MEMBERS, MOST_MEMBERS + 1])
def test_only_a_few_arguments_of_a_call_are_looked_at(num: int) -> None:
    args = b"(" + b"X\x01\0\0\0a" * num + b"t"
    words = Vocabulary({**TORCH.builders, "made.of": lambda *args: len(args)}, families=("argparse.",))
    made, called = read_pickle(b"\x80\x02(cargparse\nA\n" + args + b"Rcmade\nof\n" + args + b"Rt.", words)
    assert isinstance(made, PickledObject)
    assert len(made.args) == num
    if num > MOST_MEMBERS:
        assert called == Unreadable(f"a pickle calls made.of with {num} arguments")
        typed = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nctorch\nTensor\n"
        with pytest.raises(FormatError, match="a tensor of the class 'torch"):
            read_pickle(b"\x80\x02" + typed + args + b"NtR.", TORCH)
        with pytest.raises(FormatError, match="impossible shape"):
            read_pickle(b"\x80\x02ctorch\nSize\n((" + b"K\x01" * num + b"ttR.", TORCH)
    else:
        assert called == num


def test_a_deep_pickle_is_read_without_recursion() -> None:
    depth = 20_000
    value = read_pickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", TORCH)
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
