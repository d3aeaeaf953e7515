"""`shardrun verify-resume`: prove that stop and resume equals never having stopped, of a config or of a real run."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardrun import report
from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import require_outside
from shardrun.config.load import load
from shardrun.config.schema import Config
from shardrun.errors import LaunchError, UsageError
from shardrun.run.legs import LegFailed
from shardrun.run.lineage import choose
from shardrun.run.proof import Compared, Proof, facts_of, limits
from shardrun.run.replay import Replay
from shardrun.run.stops import DEFAULT_WINDOWS
from shardrun.run.verify import Verdict, Verification
from shardrun.run.worlds import WorldsVerification

_STREAMS = (
    "the bits after a reshard (another number of ranks adds in another order), and the ranks' own random streams, "
    "which begin anew"
)
_LENGTHS = ("train.steps=", "train.epochs=")


@dataclass(frozen=True)
class Ask:
    """What the command line asked for. `first` and `last` name the checkpoints of a run folder to replay between;
    `worlds` are numbers of ranks, with commas between."""

    json: bool = False
    keep: bool = False
    tamper: str | None = None
    first: str | None = None
    last: str | None = None
    worlds: str | None = None
    report: Path | None = None


def run(target: Path, overrides: list[str], ask: Ask) -> int:
    """Prove `target`, a config or the folder of a run; 0 or 4, or the exit code of a leg that failed.

    Raises before anything runs: ConfigError, UsageError, CheckpointError. Of a config at most DEFAULT_WINDOWS windows
    are run, unless an override gives the length of the run.
    """
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # of a torchrun around this; the legs have processes of their own
    if ask.report is not None:
        require_outside(ask.report)
        if not ask.report.resolve().parent.is_dir():
            raise UsageError(f"--report {ask.report}: there is no folder {ask.report.resolve().parent}")
    prove = _of_run(target, overrides, ask) if target.is_dir() else _of_config(target, overrides, ask)
    scratch, failed = _scratch(), False
    try:
        proof = prove(scratch)
    except LegFailed as error:
        failed = True
        _show_failure(error, shlex.join(["shardrun", "verify-resume", str(target), *overrides]), ask.json)
        return error.exit_code
    finally:
        if not (ask.keep or failed):
            shutil.rmtree(scratch, ignore_errors=True)
    kept = scratch if ask.keep else None
    if ask.report is not None:
        _write(ask.report, proof)
    if ask.json:
        report.json_document({**proof.to_json(), "scratch": kept})
    else:
        _show(proof, kept, ask.report)
    return proof.exit_code


def _scratch() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="shardrun-verify-"))
    except OSError as error:
        raise LaunchError(f"no scratch folder: {error.strerror}; point TMPDIR to a folder with room") from error


def _write(path: Path, proof: Proof) -> None:
    try:
        path.write_text(proof.to_text(), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--report {path}: cannot be written: {error.strerror}; verdict: {proof.verdict}") from error


# ---- of a run --------------------------------------------------------------------------------------------------------


def _of_run(run_dir: Path, overrides: list[str], ask: Ask) -> Callable[[Path], Proof]:
    if overrides or ask.tamper or ask.worlds:
        raise UsageError(
            f"{run_dir} is the folder of a run, which is replayed as it was; only --from and --to go with it"
        )
    pair = choose(run_dir, ask.first, ask.last)

    def prove(scratch: Path) -> Proof:
        with report.Reading() as meter:
            return Replay(pair, scratch, _Quiet(), say=_say(ask), meter=meter).run()

    return prove


# ---- of a config -----------------------------------------------------------------------------------------------------


def _of_config(config: Path, overrides: list[str], ask: Ask) -> Callable[[Path], Proof]:
    if ask.first is not None or ask.last is not None:
        raise UsageError(f"--from and --to name checkpoints of a run; {config} is not the folder of one")
    if not config.exists():
        raise UsageError(f"{config}: does not exist; give a config, or the folder of a run")
    settings = load(config, overrides)
    most = None if any(word.startswith(_LENGTHS) for word in overrides) else DEFAULT_WINDOWS

    if ask.worlds is not None:
        return partial(_of_worlds, config, settings, most, ask)

    def prove(scratch: Path) -> Proof:
        began = time.monotonic()
        verification = Verification(settings, scratch, _Quiet(), most=most, tamper=ask.tamper, say=_say(ask))
        verdict = verification.run()
        last = verification.last_checkpoint
        return _proof(f"config {config}", verdict, last, time.monotonic() - began)

    return prove


def _proof(subject: str, verdict: Verdict, last: Path | None, seconds: float) -> Proof:
    """The report of a verdict; `last` is a checkpoint that the verification made."""
    plan, manifest = verdict.plan, None if last is None else read_manifest(last)[0]
    whole = plan.total is not None and plan.end >= plan.total
    length = "" if plan.total is None else f" of {plan.total}"
    windows = [] if whole else [f"windows beyond the {plan.end}{length} that were run (train.steps=N runs N of them)"]
    not_claimed = [*windows, *limits(manifest, unsteady=verdict.unsteady)]
    stops = " and ".join(map(str, plan.stops))
    hints = list(verdict.hints)
    if plan.first:
        hints.insert(0, f"began with window {plan.first + 1} of epoch 1, so that epoch 2 begins between the stops")
    if verdict.first and verdict.first.when == "before the stop" and verdict.first.step <= plan.stops[0]:
        hints.append("nothing had been restored yet: the run differs from itself, so a resume cannot be exact either")
    if verdict.stopped_early:
        hints.append("the legs after the difference were not run")
    ranks = f"{verdict.world_size} rank{'s' * (verdict.world_size > 1)}"
    return Proof(
        f"{subject}: {plan.end} windows on {ranks}, compared before and after the stops at {stops} and at the end",
        f"stopped at {stops} and resumed in fresh processes, the run is the one that never stopped",
        [Compared(row.what, row.values, None if row.first is None else str(row.first)) for row in verdict.rows],
        None if verdict.first is None else str(verdict.first),
        {} if manifest is None else facts_of(manifest),
        not_claimed,
        seconds,
        hints,
        {"mode": "config", "not_covered": not_claimed, **verdict.to_json()},
    )


def _of_worlds(config: Path, settings: Config, most: int | None, ask: Ask, scratch: Path) -> Proof:
    began, words = time.monotonic(), str(ask.worlds).split(",")
    worlds = [int(word) if word.isdecimal() else 0 for word in words]
    verification = WorldsVerification(settings, worlds, scratch, _Quiet(), most=most, tamper=ask.tamper, say=_say(ask))
    verdict = verification.run()
    last = verification.last_checkpoint
    proof = _proof(f"config {config}", verdict, last, time.monotonic() - began)
    stops = verdict.plan.stops[: len(worlds) - 1]
    told = " and ".join(
        f"from {a} to {b} ranks at {stop}" for a, b, stop in zip(worlds, worlds[1:], stops, strict=False)
    )
    begun = [replace(row, what=f"{row.what}, up to {stops[0]}") for row in proof.rows if row.values]
    ranks = {**proof.facts.get("ranks", {}), "world size": ", then ".join(words)}
    return replace(
        proof,
        subject=f"config {config}: {verdict.plan.end} windows, resharded {told}",
        claim=f"resharded {told}, the run goes on with the same state to the bit, and stays within "
        f"{verification.tolerance:g} of the straight run's parameters (norm of the difference, per tensor)",
        rows=[*begun, *verification.found.rows],
        facts={**proof.facts, "ranks": ranks},
        first=proof.first or verification.found.first,
        not_claimed=[_STREAMS, *proof.not_claimed],
        hints=[*proof.hints, *([verification.found.hint] if verification.found.hint else [])],
        how="exact at the reshard, within the tolerance after it",
        more={"mode": "worlds", "worlds": worlds, "tolerance": verification.tolerance, "plan": verdict.plan.to_json()},
    )


# ---- the screen ------------------------------------------------------------------------------------------------------


def _say(ask: Ask) -> Callable[[str], None]:
    return (lambda text: None) if ask.json else report.line


def _show(proof: Proof, kept: Path | None, written: Path | None) -> None:
    report.line()
    rows = [[row.what, f"{row.values:,}" if row.values else "none", row.verdict] for row in proof.rows]
    report.table(proof.subject, ["what", "values", "verdict"], rows)
    report.line()
    for row in proof.rows:
        if row.first:
            report.line(f"{row.what} differ: {row.first}")
    for hint in proof.hints:
        report.line(f"note: {hint}")
    for text in proof.not_claimed:
        report.line(f"not claimed: {text}")
    if kept is not None:
        report.line(f"scratch folders: {kept}")
    if written is not None:
        report.line(f"report: {written}")
    if proof.first is None:
        report.line(f"{proof.verdict}: {proof.claim}, in all {proof.values:,} values ({proof.seconds:.1f} s)")
    else:
        report.error(f"NOT identical. First difference: {proof.first}")


def _show_failure(error: LegFailed, again: str, json: bool) -> None:
    report.error(f"{error}\nits folder is kept: {error.run_dir}")
    report.error("\n".join(report.failure_lines(error.outcome, error.run_dir, again, None)))
    report.error("nothing is claimed: the proof did not come to its end")
    if json:
        report.json_document({"verdict": "none", "error": str(error), "exit_code": error.exit_code})


class _Quiet:
    """Shows warnings of the ranks, once each; their lines still go to the logs of the legs."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def event(self, rank: int, event: Mapping[str, object]) -> list[str]:
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
