"""Negative controls: one thing restored wrongly on purpose, and the verification has to find and name it.

The straight run and the first leg are made once; each control goes on from a copy with a second leg of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardrun.config.load import load
from shardrun.config.schema import Config
from shardrun.run.stops import Stops
from shardrun.run.tamper import TAMPERS
from shardrun.run.verify import Verdict, Verification
from tests.support.verifying import verify_config


class Silent:
    """A screen that shows nothing."""

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        return [str(event)]

    def output(self, rank: int, text: str) -> None:
        pass


@dataclass(frozen=True)
class Begun:
    """A verification after its first stop."""

    settings: Config
    scratch: Path
    plan: Stops

    def go_on(self, folder: Path, tamper: str | None) -> Verdict:
        """The second leg, from a copy in `folder`."""
        shutil.copytree(self.scratch, folder)
        verification = Verification(self.settings, folder, Silent(), tamper=tamper)
        verification.leg(self.plan, 2)
        return verification.verdict(self.plan)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """bf16 with masters, two option groups, accumulation, dropout, buffers; one rank."""
    folder = tmp_path_factory.mktemp("verify")
    settings = load(verify_config(folder, precision={"parameters": "bf16"}))
    verification = Verification(settings, folder / "scratch", Silent())
    plan = verification.straight()
    verification.leg(plan, 1)
    verdict = verification.verdict(plan)
    assert verdict.first is None, verdict.first
    assert plan.stops == (2, 5)
    return Begun(settings, folder / "scratch", plan)


def test_without_a_fault_the_second_leg_is_bit_identical(begun: Begun, tmp_path: Path) -> None:
    verdict = begun.go_on(tmp_path / "copy", None)
    assert (verdict.first, verdict.exit_code) == (None, 0)
    compared = {row.what: row.values for row in verdict.rows}
    optimizer = {"optimizer exp_avg", "optimizer exp_avg_sq", "optimizer step", "optimizer options"}
    assert compared.keys() >= {*EXPECTED_WHAT.values(), "data seen", "metrics", *optimizer}
    assert all(compared.values()), compared
    # Restored and left: two moments of 7 * 15 + 15 + 15 * 3 + 3 parameters and of 15 + 3 + 1 buffer elements.
    assert (compared["parameters"], compared["fp32 masters"], compared["buffers"]) == (336, 336, 38)


EXPECTED_WHAT = {
    "parameter": "parameters",
    "master": "fp32 masters",
    "moment": "optimizer exp_avg",
    "step-count": "optimizer step",
    "schedule": "schedule",
    "data-position": "data position",
    "rng-python": "rng python",
    "rng-numpy": "rng numpy",
    "rng-torch": "rng torch",
    "counter": "counters",
    "buffer": "buffers",
}
EXPECTED_NAME = {
    "parameter": "first.weight",
    "master": "first.weight",
    "moment": "first.weight",
    "step-count": "first.weight",
    "schedule": "position",
    "data-position": "position",
    "counter": "tokens",
    "buffer": "running_mean",
}


def test_there_is_a_control_for_each_kind_of_state() -> None:
    assert EXPECTED_WHAT.keys() == TAMPERS.keys()


@pytest.mark.parametrize("name", list(EXPECTED_WHAT))
def test_what_is_restored_wrongly_is_named(begun: Begun, tmp_path: Path, name: str) -> None:
    verdict = begun.go_on(tmp_path / "copy", name)
    first = verdict.first
    assert first is not None
    assert verdict.exit_code == 4
    assert (first.what, first.when, first.step, first.rank) == (EXPECTED_WHAT[name], "after the restore", 2, 0)
    assert first.name == EXPECTED_NAME.get(name, first.name)
    assert first.straight != first.interrupted
    wrong = {row.what for row in verdict.rows if row.first is not None and row.first.when == "after the restore"}
    assert wrong == {EXPECTED_WHAT[name]}
    text = str(first)
    assert all(part in text for part in ("step 2", "rank 0", first.what, first.name, first.straight, first.interrupted))
    if name in ("parameter", "master", "moment", "buffer"):
        assert first.element == 0
