"""`shardrun verify-resume`: prove that stop and resume equals never having stopped."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardrun import report
from shardrun.config.load import load
from shardrun.errors import LaunchError
from shardrun.run.comparison import Row
from shardrun.run.stops import DEFAULT_WINDOWS
from shardrun.run.verify import LegFailed, Verdict, Verification

_LENGTHS = ("train.steps=", "train.epochs=")


def run(config: Path, overrides: list[str], json: bool, keep: bool = False, tamper: str | None = None) -> int:
    """Run the proof and return 0 or 4, or the exit code of a leg that failed. Raises ConfigError before anything runs.

    At most DEFAULT_WINDOWS windows are run, unless an override gives the length of the run.
    """
    settings = load(config, overrides)
    most = None if any(word.startswith(_LENGTHS) for word in overrides) else DEFAULT_WINDOWS
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # of a torchrun around this; the legs have processes of their own
    scratch = _scratch()
    verification = Verification(
        settings, scratch, _Quiet(json), most=most, tamper=tamper, say=(lambda text: None) if json else report.line
    )
    failed = False
    try:
        verdict = verification.run()
    except LegFailed as error:
        failed = True
        _show_failure(error, shlex.join(["shardrun", "verify-resume", str(config), *overrides]), json)
        return error.exit_code
    finally:
        if not (keep or failed):
            shutil.rmtree(scratch, ignore_errors=True)
    kept = scratch if keep else None
    if json:
        report.json_document({**verdict.to_json(), "not_covered": _not_covered(verdict), "scratch": kept})
    else:
        _show(verdict, kept)
    return verdict.exit_code


def _scratch() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="shardrun-verify-"))
    except OSError as error:
        raise LaunchError(f"no scratch folder: {error.strerror}; point TMPDIR to a folder with room") from error


def _show(verdict: Verdict, kept: Path | None) -> None:
    plan, ranks = verdict.plan, verdict.world_size
    if plan.first:
        report.line(f"began with window {plan.first + 1} of epoch 1, so that epoch 2 begins between the stops")
    report.line()
    rows = [[row.what, f"{row.values:,}" if row.values else "none", _verdict(row)] for row in verdict.rows]
    stops = " and ".join(map(str, plan.stops))
    title = f"compared on {ranks} rank{'s' * (ranks > 1)}: before and after the stops at {stops}, and at the end"
    report.table(title, ["what", "values", "verdict"], rows)
    report.line()
    for hint in verdict.hints:
        report.line(f"note: {hint}")
    for text in _not_covered(verdict):
        report.line(f"not covered: {text}")
    if kept is not None:
        report.line(f"scratch folders: {kept}")
    if verdict.first is None:
        report.line(
            f"bit-identical: stopped at {stops} and resumed in fresh processes, the run is the one that never stopped, "
            f"in all {verdict.values:,} values"
        )
        return
    report.error(f"NOT identical. First difference: {verdict.first}")
    if verdict.first.when == "before the stop" and verdict.first.step <= plan.stops[0]:
        report.error("nothing had been restored yet: the run differs from itself, so a resume cannot be exact either")
    if verdict.stopped_early:
        report.error("the legs after it were not run")


def _verdict(row: Row) -> str:
    if row.first is not None:
        return f"differs at step {row.first.step}, {row.first.when}, rank {row.first.rank}"
    return "bit-identical" if row.values else "-"


def _not_covered(verdict: Verdict) -> list[str]:
    plan = verdict.plan
    whole = plan.total is not None and plan.end >= plan.total
    length = "" if plan.total is None else f" of {plan.total}"
    windows = [] if whole else [f"windows beyond the {plan.end}{length} that were run (train.steps=N runs N of them)"]
    return [
        *windows,
        "another machine, world size or version of torch",
        "what the recipe takes from outside itself (clock, network, files that change): "
        "a change is seen only if it falls into these windows",
    ]


def _show_failure(error: LegFailed, again: str, json: bool) -> None:
    report.error(f"{error}\nits folder is kept: {error.run_dir}")
    report.error("\n".join(report.failure_lines(error.outcome, error.run_dir, again, None)))
    if json:
        report.json_document({"verdict": "none", "error": str(error), "exit_code": error.exit_code})


class _Quiet:
    """Shows warnings of the ranks, once each; their lines still go to the logs of the legs."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._shown: set[str] = set()

    def event(self, rank: int, event: Mapping[str, Any]) -> list[str]:
        """The lines of an event, for the log of its rank."""
        lines = report.event_lines({"rank": rank, **event})
        if event["event"] in ("warning", "stopping"):
            for text in lines:
                if text not in self._shown:
                    self._shown.add(text)
                    report.error(text)
        return lines

    def output(self, rank: int, text: str) -> None:
        """What a recipe prints is in the log of its rank."""
