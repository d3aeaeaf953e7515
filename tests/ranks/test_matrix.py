"""Drawn models, windows and worlds: every session is held to the reference, to the last bit and beside float64.

SHARDRUN_MATRIX_EXAMPLES is how many are drawn in all; a counterexample is printed as the expression that runs it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.matrix import Worlds, differences, examples

KINDS = ("zero2",)
_EXAMPLES = int(os.environ.get("SHARDRUN_MATRIX_EXAMPLES", "100"))


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with Worlds() as started:
        yield started


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_every_session_is_the_reference(kind: str, worlds: Worlds) -> None:
    @settings(max_examples=max(1, _EXAMPLES // len(KINDS)), deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def hold(data: st.DataObject) -> None:
        example = data.draw(examples(kind), label="example")
        found = differences(example, worlds.run(example))
        assert found == [], "\n".join(found)

    hold()
