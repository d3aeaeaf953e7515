"""The whole of what ranks have: each tensor once, under one naming."""

from __future__ import annotations

import pytest

from shardrun.run.model_files import join_parts

ROW: list[object] = ["F32", [4]]


def test_each_tensor_is_written_by_the_first_rank_that_has_it() -> None:
    joined, problem = join_parts({0: ({"a": ROW, "b": ROW}, {"c": "a"}), 1: ({"a": ROW, "d": ROW}, {"c": "a"})})
    assert not problem
    assert joined.specs == {"a": ROW, "b": ROW, "d": ROW}
    assert joined.aliases == {"c": "a"}
    assert joined.holder == {"a": 0, "b": 0, "d": 1}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            ({"a": ["F32", [5]]}, {}),
            "a is the name of different tensors: rank 0 has ['F32', [4]], rank 1 has ['F32', [5]]",
        ),
        (
            ({"a": ROW, "c": ROW}, {}),
            "c is tied to a, but a tensor of its own on rank 1; tie it on all ranks that have it",
        ),
        (({"a": ROW, "b": ROW}, {"c": "b"}), "c is tied to a and on rank 1 to b; tie it alike on all ranks"),
    ],
)
def test_a_name_that_means_two_things_is_refused(
    other: tuple[dict[str, list[object]], dict[str, str]], said: str
) -> None:
    assert join_parts({0: ({"a": ROW}, {"c": "a"}), 1: other})[1].startswith(said)
