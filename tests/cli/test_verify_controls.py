"""Negative controls: one thing restored wrongly on purpose, and the verification has to find and name it.

The straight run and the first leg are made once; each control goes on from a copy with a second leg of its own. All
of it at once, as a program, is in test_verify_resume.py.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardrun.config.load import from_mapping, load
from shardrun.config.schema import Config
from shardrun.run.legs import LegFailed
from shardrun.run.stops import Stops
from shardrun.run.tamper import TAMPERS
from shardrun.run.verify import Verdict, Verification
from tests.support.training import document
from tests.support.verifying import Silent, forked, verify_config


@dataclass(frozen=True)
class Begun:
    """A verification after its first stop."""

    settings: Config
    scratch: Path
    plan: Stops

    def go_on(self, folder: Path, tamper: str | None) -> Verdict:
        """The second leg, from a copy in `folder`."""
        shutil.copytree(self.scratch, folder)
        verification = Verification(self.settings, folder, Silent(), tamper=tamper, start=forked)
        verification.leg(self.plan, 2)
        return verification.verdict(self.plan)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """bf16 with masters, two option groups, accumulation, dropout, buffers; one rank."""
    folder = tmp_path_factory.mktemp("verify")
    settings = load(verify_config(folder, precision={"parameters": "bf16"}))
    verification = Verification(settings, folder / "scratch", Silent(), start=forked)
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


@pytest.mark.parametrize(
    ("tamper", "why"),
    [("buffer", "the model has none"), ("master", "fp32 parameters have none"), ("moment", "sgd with these options")],
)
def test_a_control_that_has_nothing_to_change_says_so(tmp_path: Path, tamper: str, why: str) -> None:
    settings = from_mapping(document(tmp_path, 1, {"train": {"steps": 3, "global_batch_size": 1}}, samples=[[1.0]] * 4))
    verification = Verification(settings, tmp_path / "scratch", Silent(), tamper=tamper, start=forked)
    with pytest.raises(LegFailed, match=f"--tamper {tamper}: nothing to change: {why}") as caught:
        verification.run()
    assert caught.value.exit_code == 2


# ---- what no checkpoint can hold -----------------------------------------------------------------------------------


def test_data_that_remembers_is_found_where_it_first_differs(tmp_path: Path) -> None:
    """Items that depend on how often the data set was asked: the count begins anew with each leg."""
    settings = load(verify_config(tmp_path, recipe_args={"fault": "data"}))
    verdict = Verification(settings, tmp_path / "scratch", Silent(), start=forked).run()
    first = verdict.first
    assert first is not None
    assert (first.what, first.when, first.step) == ("data seen", "before the stop", 3)
    assert first.name == "micro-batch 0: sha256"
    assert verdict.stopped_early


def test_a_run_that_differs_from_itself_is_told_from_a_bad_resume(tmp_path: Path) -> None:
    settings = load(verify_config(tmp_path, recipe_args={"fault": "chance"}))
    verdict = Verification(settings, tmp_path / "scratch", Silent(), start=forked).run()
    assert verdict.first is not None
    assert (verdict.first.when, verdict.first.step) == ("before the stop", 1)


# ---- other lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "stops", "end", "first"),
    [
        ({"epochs": 2}, (3, 5), 8, 0),
        ({"epochs": 1}, (1, 3), 4, 0),
        ({"tokens": 50}, (2, 5), 7, 0),
        ({"steps": 900}, (6, 11), 18, 0),
    ],
)
def test_a_run_may_be_measured_in_epochs_or_tokens(
    tmp_path: Path, length: dict[str, int], stops: tuple[int, ...], end: int, first: int
) -> None:
    config = verify_config(tmp_path, train={"steps": None, **length}, schedule={"name": "constant"})
    plan = Verification(load(config), tmp_path / "scratch", Silent(), start=forked).straight()
    assert (plan.stops, plan.end, plan.first) == (stops, end, first)


def test_a_long_epoch_is_entered_near_its_end_and_resumes_inside_the_next(tmp_path: Path) -> None:
    config = verify_config(tmp_path, recipe_args={"samples": 1000}, train={"steps": 6})
    verdict = Verification(load(config), tmp_path / "scratch", Silent(), start=forked).run()
    plan = verdict.plan
    assert (plan.windows_per_epoch, plan.first, plan.end, plan.stops) == (125, 122, 6, (2, 4))
    assert [plan.epoch(stop) for stop in plan.stops] == [1, 2]
    assert verdict.first is None, verdict.first
