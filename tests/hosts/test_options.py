"""What `shardrun train` does with the options for several hosts, before any host meets another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardrun.cli import train
from shardrun.cli.hosts import party_of
from shardrun.config.load import load
from shardrun.errors import UsageError
from shardrun.run.gathering import differences
from shardrun.run.hosts import Hosts
from tests.support.launching import write_config

WHERE = {"nnodes": 2, "node_rank": 0, "rendezvous": "127.0.0.1:29400"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**WHERE, "fresh": True}, "--fresh cannot choose a folder for hosts that are started apart"),
        ({"rendezvous": "a:1"}, "--rendezvous a:1 is for several hosts; give --nnodes too, or leave it out"),
        ({**WHERE, "nnodes": 3}, "topology.world_size is 2, which 3 hosts cannot share equally"),
        ({**WHERE, "rendezvous": "10.0.0.1:29400"}, "set topology.allow_non_loopback=true"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        train.run(write_config(tmp_path), [], **given)
    assert not (tmp_path / "run").exists()


def same(config: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    return dict(party_of(load(config, list(overrides)), Hosts(2, 0, "127.0.0.1", 29400), options).same)


def test_hosts_compare_what_they_would_run_and_not_where(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("one = 1\n")
    config = write_config(tmp_path)
    here = same(config, f"recipe={recipe}", stop_at=5)
    assert json.loads(json.dumps(here)) == here
    assert (
        differences(same(config, f"recipe={recipe}", "run.dir=/elsewhere", "log.stdout=false", stop_at=5), here) == []
    )
    there = same(config, f"recipe={recipe}", "optimizer.lr=0.5", "topology.timeout_s=9", stop_at=6)
    assert differences(there, here) == [
        "--stop-at: 6 / 5",
        "optimizer.lr: 0.5 / 0.01",
        "topology.timeout_s: 9.0 / 60.0",
    ]
    recipe.write_text("one = 2\n")
    (line,) = differences(same(config, f"recipe={recipe}", stop_at=5), here)
    assert line.startswith("recipe's sha256: ")


def test_a_recipe_that_is_a_module_is_compared_by_name(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert same(config, "recipe=recipes.gpt")["recipe"] == "recipes.gpt"
    assert same(config, "recipe=recipes.gpt")["recipe's sha256"] is None
