"""Groups and axes of a config: which ranks hold what, and what cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrun.config.groups import axis_lines, places, rank_of, replica_sets
from shardrun.config.load import from_mapping, load, resolved_yaml
from shardrun.config.schema import meaning
from shardrun.errors import ConfigError

AXES = {"replicas": 2, "experts": 2}
SGD = {"name": "sgd", "lr": 1.0}
GROUPS: dict[str, dict[str, Any]] = {
    "dense": {"select": {"exclude": ["*.experts.*"]}, "optimizer": SGD},
    "experts": {"select": {"include": ["*.experts.*"]}, "replicas": "experts", "optimizer": SGD},
}


def document(**sections: Any) -> dict[str, Any]:
    base = {
        "recipe": "some.recipe",
        "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 4},
        "topology": {"world_size": 4, "axes": AXES},
        "groups": GROUPS,
    }
    return {key: value for key, value in {**base, **sections}.items() if value is not None}


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(document(**sections))
    (line,) = caught.value.problems
    return line.removeprefix("config: ")


def test_ranks_stand_on_the_axes_with_the_last_one_fastest() -> None:
    assert places(AXES) == [
        {"replicas": 0, "experts": 0},
        {"replicas": 0, "experts": 1},
        {"replicas": 1, "experts": 0},
        {"replicas": 1, "experts": 1},
    ]


def test_an_axis_has_a_replica_set_for_each_of_its_places() -> None:
    assert replica_sets("world", AXES, 4) == ((0, 1, 2, 3),)
    assert replica_sets("experts", AXES, 4) == ((0, 2), (1, 3))
    assert replica_sets("replicas", AXES, 4) == ((0, 1), (2, 3))
    assert replica_sets([[0, 3], [1, 2]], {}, 4) == ((0, 3), (1, 2))


def test_those_who_exchange_along_an_axis_differ_in_it_alone() -> None:
    assert axis_lines("experts", AXES) == ((0, 1), (2, 3))
    assert axis_lines("replicas", AXES) == ((0, 2), (1, 3))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_lines_and_replica_sets_are_partitions_that_meet_in_one_rank(sizes: list[int]) -> None:
    axes = {f"a{number}": size for number, size in enumerate(sizes)}
    world = len(places(axes))
    assert [rank_of(place, axes) for place in places(axes)] == [*range(world)]
    for axis, size in axes.items():
        lines, sets = axis_lines(axis, axes), replica_sets(axis, axes, world)
        for cut in (lines, sets):
            assert sorted(rank for ranks in cut for rank in ranks) == [*range(world)]
            assert all(list(ranks) == sorted(ranks) for ranks in cut)
        assert len(sets) == size
        assert all(len({*line} & {*held}) == 1 for line in lines for held in sets)


def test_one_group_at_the_top_level_is_called_default() -> None:
    config = from_mapping(document(groups=None, select={"include": ["head.*"]}, optimizer=SGD))
    assert [*config.parts] == ["default"]
    assert config.parts["default"].select.include == ("head.*",)
    assert config.parts["default"].replicas == "world"


def test_a_resolved_config_of_groups_runs_again(tmp_path: Path) -> None:
    config = from_mapping(document())
    assert [*config.parts] == ["dense", "experts"]
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(config).replace("some.recipe", "json"))
    assert load(path).groups == config.groups
    assert load(path).topology == config.topology


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"groups": None}, "optimizer: required key is missing; or groups, for several of them"),
        ({"optimizer": SGD}, "optimizer: given besides groups; write it in the groups that it is about"),
        ({"select": {"include": ["a"]}}, "select: given besides groups; write it in the groups that it is about"),
        (
            {"topology": {"world_size": 4, "axes": {"replicas": 2, "experts": 3}}},
            "topology.axes: replicas 2 x experts 3 are 6 ranks, but topology.world_size is 4; make them equal",
        ),
        (
            {"topology": {"world_size": 4, "axes": {"world": 4}}, "groups": {"a": GROUPS["dense"]}},
            "topology.axes: world is not the name of an axis; it stands for all ranks",
        ),
        (
            {"topology": {"world_size": 4}},
            "groups.experts.replicas: 'experts' is no axis of the topology; allowed: world, or lists of ranks",
        ),
        (
            {"groups": {"a": {"optimizer": SGD, "replicas": [[0, 1], [1, 2]]}}},
            "groups.a.replicas: [[0, 1], [1, 2]] is no partition of the 4 ranks; name each of them once",
        ),
        (
            {"groups": {"a": {"optimizer": SGD, "replicas": [[1, 0], [2, 3]]}}},
            "groups.a.replicas: [[1, 0], [2, 3]] has ranks out of order; write each set in rising order",
        ),
        (
            {"groups": {"a": {"optimizer": SGD, "replicas": [[], [0, 1, 2, 3]]}}},
            "groups.a.replicas: [[], [0, 1, 2, 3]] has an empty set of ranks; leave it out",
        ),
        (
            {"groups": {**GROUPS, "experts-1": {"optimizer": SGD}}},
            "groups.experts-1: the name of a part of groups.experts, as checkpoints have it; name the group otherwise",
        ),
        ({"groups": {"a": {}}}, "groups.a.optimizer: required key is missing"),
        (
            {"groups": {"a": {"optimizer": {**SGD, "momentun": 1}}}},
            "groups.a.optimizer.momentun: unknown key (found 1); did you mean optimizer.momentum?",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(sections: dict[str, Any], said: str) -> None:
    assert problem(**sections) == said


def test_a_length_counts_where_any_group_stretches_its_schedule_over_it() -> None:
    """Else a run that is made longer would go on at other rates without a word."""

    def changed(**schedules: Any) -> bool:
        groups = {name: {**GROUPS[name], "schedule": schedules.get(name)} for name in GROUPS}
        train = [{"steps": n, "micro_batch_size": 1, "global_batch_size": 4} for n in (10, 20)]
        run = {"schedule": schedules.get("run", {"name": "constant"})}
        short, long = (meaning(from_mapping(document(groups=groups, train=one, **run))) for one in train)
        return short != long

    cosine, constant = {"name": "cosine"}, {"name": "constant"}
    assert not changed()
    assert changed(run=cosine)
    assert changed(experts=cosine)
    assert not changed(experts={**cosine, "total_steps": 10})
    assert changed(run=cosine, experts=constant)
    assert not changed(run=cosine, experts=constant, dense=constant)
