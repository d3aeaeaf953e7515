"""`dotted.key=value` words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrun.config.document import Document, read_document
from shardrun.config.overrides import apply_overrides


def laid(text: str, *words: str) -> Document:
    document = read_document(text, "c.yaml")
    apply_overrides(document, words)
    return document


def test_values_are_yaml_and_replace_what_was_there() -> None:
    document = laid("a: {b: 1, c: 2}\nl: [1, 2]\n", "a.b=1e-4", "l=[x, {y: true}]", "a.c=", "t='5'")
    assert document.problems == []
    assert document.data == {"a": {"b": 1e-4, "c": None}, "l": ["x", {"y": True}], "t": "5"}


def test_sections_on_the_way_are_made() -> None:
    document = laid("a: null\n", "a.b.c=1", "d.e=2")
    assert document.data == {"a": {"b": {"c": 1}}, "d": {"e": 2}}
    assert laid("", "a.b=1").data == {"a": {"b": 1}}


def test_entries_of_lists_are_reached_by_number() -> None:
    assert laid("a: [{b: 1}, {b: 2}]", "a.1.b=3").data == {"a": [{"b": 1}, {"b": 3}]}


def test_a_value_may_hold_equals_signs() -> None:
    assert laid("", "a=x=y").data == {"a": "x=y"}


def test_places_point_at_the_word_and_at_what_the_word_did_not_touch() -> None:
    document = laid("a:\n  b: [1, 2]\n  c: 3\n", "a.b={d: 4}")
    assert document.place(("a", "b", "d")).text == "override 'a.b={d: 4}'"
    assert document.place(("a", "c")).text == "c.yaml:3:6"
    assert document.place(("a", "b", 1)).text == "override 'a.b={d: 4}'"  # the list that was there is forgotten


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a", "override 'a': not of the form dotted.key=value"),
        ("=1", "override '=1': not of the form dotted.key=value"),
        ("a..b=1", "override 'a..b=1': not of the form dotted.key=value"),
        ("s.x=1", "override 's.x=1': s is 5 and no section; 'x' cannot be set in it"),
        ("l.2=1", "override 'l.2=1': l is a list of 2; no entry '2' in it"),
        ("l.x=1", "override 'l.x=1': l is a list of 2; no entry 'x' in it"),
        ("s=[1", "override 's=[1': not readable as YAML"),
        ("s=*", "a text with * & ! % @ in front has to be in double quotes"),
        ("s=a: b", "override 's=a: b': s: a list is written [a, b] and a section {key: value}"),
        ("s=- a", "override 's=- a': s: a list is written [a, b] and a section {key: value}"),
        ("s={x: 1, x: 2}", "override 's={x: 1, x: 2}': s.x: written twice, on one value; keep one of them"),
        ("s=!!python/name:os.system", "override 's=!!python/name:os.system': s: the tag"),
    ],
)
def test_what_cannot_be_meant_is_a_problem_at_the_word(word: str, expected: str) -> None:
    document = laid("s: 5\nl: [1, 2]\n", word)
    assert [expected in str(problem) for problem in document.problems] == [True], document.problems


def test_the_same_key_twice_is_a_problem() -> None:
    document = laid("", "a.b=1", "a.b=2")
    assert [str(problem) for problem in document.problems] == [
        "override 'a.b=2': a.b: already set by 'a.b=1'; keep one of them"
    ]


names = st.text("abcdefgh_", min_size=1, max_size=4)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


@given(st.lists(names, min_size=1, max_size=4), values, st.dictionaries(names, st.integers(), max_size=3))
def test_a_json_value_comes_out_as_it_went_in(path: list[str], value: Any, before: dict[str, int]) -> None:
    document = read_document(json.dumps({"kept": before}), "c.yaml")
    apply_overrides(document, [f"new.{'.'.join(path)}={json.dumps(value)}"])
    assert document.problems == []
    found = document.data["new"]
    for name in path:
        found = found[name]
    assert found == value
    assert document.data["kept"] == before
