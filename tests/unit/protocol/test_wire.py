"""Everything that machines send, receive or order survives JSON; nothing else is accepted."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Hello, Holding, Pull, StepReport, Version
from decoupled_diloco.protocol.wire import (
    INTEGER_MAX,
    ITEMS_MAX,
    TEXT_CHARACTERS_MAX,
    decode,
    encode,
)

CLASSES: list[type] = sorted(
    {
        value
        for module in (messages,)
        for value in vars(module).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    },
    key=lambda cls: cls.__name__,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(argument) for argument in arguments))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values_of(argument) for argument in arguments))
    if hint is type(None):
        return st.none()
    if dataclasses.is_dataclass(hint):
        return instances_of(typing.cast("type", hint))
    return {
        int: st.integers(0, INTEGER_MAX),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
    }[hint]


def instances_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(
        cls, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(cls)}
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_survives_a_round_trip(cls: type) -> None:
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(instances_of(cls))
    def round_trip(value: Any) -> None:
        assert decode(json.loads(json.dumps(encode(value))), [cls]) == value

    round_trip()


GOOD = encode(StepReport(3, 96, 0.5))
PULL = encode(Pull(0, Asking(1, 5), Version(1, 2), 4, "bf16", "carry", "/up", False, (3, 7)))
HELLO = encode(Hello("a", 1, "n", "learner", 0, 0, None, (Holding(0, Version(1, 0)),)))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([], "message is list, expected an object"),
        (None, "message is NoneType"),
        ({}, "message has type 'None'"),
        ({"type": "Tick"}, "message has type 'Tick', expected"),
        ({"type": 7}, "message has type '7'"),
        ({"type": "x" * 1000}, "expected"),
        ({**GOOD, "more": 1}, "unknown fields ['more']"),
        ({"type": "StepReport", "step": 3, "tokens": 1}, "missing ['seconds']"),
        ({**GOOD, "step": "3"}, "StepReport.step is str, expected an integer"),
        ({**GOOD, "step": True}, "StepReport.step is bool, expected an integer"),
        ({**GOOD, "step": 3.0}, "StepReport.step is float, expected an integer"),
        ({**GOOD, "step": -1}, "StepReport.step=-1 must be 0 to 2^53"),
        ({**GOOD, "tokens": 2**53 + 1}, "must be 0 to 2^53"),
        ({**GOOD, "seconds": float("nan")}, "StepReport.seconds=nan must be finite"),
        ({**GOOD, "seconds": float("inf")}, "must be finite"),
        ({**GOOD, "seconds": None}, "expected a number"),
        ({**PULL, "final": 1}, "Pull.final is int, expected true or false"),
        ({**PULL, "base": None}, "Pull.base is NoneType, expected an object"),
        ({**PULL, "base": {"type": "Version", "term": 1}}, "missing ['counter']"),
        ({**PULL, "ask": 5}, "Pull.ask is int, expected an object"),
        ({**PULL, "coming": [True]}, "Pull.coming[0] is bool, expected an integer"),
        ({**PULL, "path": "x" * (TEXT_CHARACTERS_MAX + 1)}, "Pull.path must be a text"),
        ({**HELLO, "role": "boss"}, "Hello.role is 'boss', expected one of"),
        ({**HELLO, "held": {}}, "Hello.held must be a list"),
        ({**HELLO, "held": [1]}, "Hello.held[0] is int, expected an object"),
        ({**HELLO, "held": [None] * (ITEMS_MAX + 1)}, "must be a list of at most"),
        ({**HELLO, "run_step": "no"}, "Hello.run_step is str"),
    ],
)
def test_invalid_input_is_refused_with_the_field(data: object, complaint: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data, [StepReport, Pull, Hello])
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 500, "a peer cannot fill the log"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=10,
    )
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_anything_else_is_a_protocol_error(data: object) -> None:
    with pytest.raises(ProtocolError):
        decode(data, CLASSES)
