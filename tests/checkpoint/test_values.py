"""Plain values: what comes back is what was given, and everything else is refused by name, written or read."""

import collections
import enum
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_core.checkpoint import CheckpointError
from mixle_core.checkpoint.values import MAX_DEPTH, decode, dump_json, encode, parse_json

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
odd = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1])
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), odd, text, st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.qint8]),
    st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
)  # fmt: skip
key = st.one_of(plain, st.just("!tuple"), st.tuples(plain, plain))
value = st.recursive(
    plain,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(key, inner, max_size=4)),
    max_leaves=20,
)


def same(a, b):
    """Equal in type, in bits, and in the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return a == b


@given(value)
@settings(max_examples=250, deadline=None, database=None, derandomize=True)
def test_what_comes_back_has_the_same_types_and_bits(given_value):
    encoded = encode(given_value, "value")
    assert same(decode(parse_json(dump_json(encoded), "file"), "value"), given_value)


def test_the_comparison_sees_types_bits_and_order():
    for a, b in [(0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), ({1: 2, 3: 4}, {3: 4, 1: 2}), (torch.Size([1]), (1,))]:
        assert not same(a, b)
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert not same(math.nan, nan)
    assert same(decode(encode(nan, "x"), "x"), nan)


class Kind(enum.IntEnum):
    A = 1


@pytest.mark.parametrize(
    ("refused", "kind", "hint"),
    [
        (torch.ones(2), "torch.Tensor", "save it as a named tensor"),
        (torch.nn.Parameter(torch.ones(2)), "torch.nn.parameter.Parameter", "save it as a named tensor"),
        (np.ones(2), "numpy.ndarray", "torch.from_numpy"),
        (np.float64(1), "numpy.float64", ".item()"),
        (np.int64(1), "numpy.int64", ".item()"),
        (np.bool_(True), "numpy.bool", ".item()"),
        (Kind.A, "Kind", "plain int"),
        (collections.OrderedDict(a=1), "collections.OrderedDict", "plain dict"),
        (collections.Counter("aab"), "collections.Counter", "plain dict"),
        ({1, 2}, "builtins.set", "plain values"),
        (object(), "builtins.object", "plain values"),
        (lambda: 0, "builtins.function", "plain values"),
        (1j, "builtins.complex", "plain values"),
        (bytearray(b"x"), "builtins.bytearray", "plain values"),
    ],
    ids=lambda item: item if isinstance(item, str) else type(item).__name__,
)
def test_everything_else_is_refused_with_its_type_and_place(refused, kind, hint):
    for nested, place in ([refused], "sched[0]"), ({"a": (0, refused)}, "sched['a'][1]"), ({3: refused}, "sched[3]"):
        with pytest.raises(CheckpointError) as error:
            encode(nested, "sched")
        assert str(error.value).startswith(f"{place}: cannot store a ")
        assert kind in str(error.value)
        assert hint in str(error.value).partition("way out: ")[2]


def test_keys_cycles_depth_surrogates_and_huge_ints_are_refused():
    cycle = []
    cycle.append(cycle)
    deep = 0
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert same(decode(encode(deep, "v"), "v"), deep)
    refused = [
        ({frozenset(): 1}, "a key of type builtins.frozenset"),
        ({np.int64(1): 1}, "a key of type numpy.int64"),
        (cycle, "nested more than 64 deep, or in a cycle"),
        ([deep], "nested more than 64 deep"),
        ("\ud800", "lone surrogates"),
        ({"\udfff": 1}, "lone surrogates"),
        (1 << 5000, "an int of 5001 bits"),
    ]
    for wrong, said in refused:
        with pytest.raises(CheckpointError, match=said):
            encode(wrong, "v")


@pytest.mark.parametrize(
    "document",
    [
        {"!what": 1}, {"!tuple": [1], "a": 2}, {"a": 2, "!tuple": [1]}, {"!tuple": {"a": 1}}, {"!tuple": "ab"}, {"!float": "7ff0"},
        {"!float": 1.0}, {"!float": "3ff0000000000000"}, {"!float": "7FF0000000000000"}, {"!float": "7f f0000000000000"},
        {"!bytes": "a"}, {"!bytes": "YWI"}, {"!bytes": "YW I="}, {"!bytes": "YWJ="}, {"!bytes": [1]}, {"!dtype": "Tensor"},
        {"!dtype": "float33"}, {"!size": [-1]}, {"!size": [True]}, {"!size": [1.0]}, {"!size": [2**63]}, {"!size": 3}, {"!dict": [[1]]},
        {"!dict": [[1, 2], [1, 3]]}, {"!dict": [[1, 2], [True, 3]]}, {"!dict": [[[1], 2]]}, {"!dict": [[{"!tuple": [[1]]}, 2]]},
        {"!dict": {"a": 1}}, ["\ud800"], {"\ud800": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_was_not_encoded_here_is_not_decoded(document):
    with pytest.raises(CheckpointError, match="expected a value that was encoded here"):
        decode(json.loads(json.dumps(document)), "values, x")


def test_deep_values_are_refused_when_read():
    document = 0
    for _ in range(MAX_DEPTH + 1):
        document = [document]
    with pytest.raises(CheckpointError, match="nested more than 64 deep"):
        decode(document, "x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a":1,"a":1}', "the key 'a' stands twice"),
        (b'{"b":{"a":1,"c":2,"a":3}}', "the key 'a' stands twice"),
        (b"[NaN]", "NaN is no JSON"),
        (b"[-Infinity]", "-Infinity is no JSON"),
        (b"\xff", "can't decode"),
        (b"[" * 200_000, "recursion"),
        (b"[" + b"9" * 5000 + b"]", "4300"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
    ],
    ids=lambda item: item[:20],
)
def test_json_says_one_thing_only(data, said):
    with pytest.raises(CheckpointError, match=said) as error:
        parse_json(data, "dir/metadata.json")
    assert str(error.value).startswith("dir/metadata.json: ")


def test_a_number_beyond_float_is_refused():
    with pytest.raises(CheckpointError, match="beyond the range of float"):
        decode(parse_json(b"1e999", "f"), "x")
