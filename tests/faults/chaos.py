"""A hundred ends: a tiny quickstart on two ranks is killed, stopped, woken, broken and lied to at random, and goes on.

    python -m tests.faults.chaos --cycles 100 --seed 4

A cycle starts the run where it stands and lets one thing happen to it, by `--fault` or from outside; the next cycle
goes on from what is left. When a run has come to its end it is held against its twin that nothing happened to: all
tensors of the last checkpoint, its counters and data position, and every row of the metrics, so that no sample was lost
or trained on twice. Then the next run begins, in another variant. What happens follows from the seed; at which moment
it hits is up to the machine as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardrun.checkpoint.manifest import read_manifest
from shardrun.checkpoint.store import newest, scan
from shardrun.run.metrics import read_rows
from tests.faults.deeds import DEEDS, SAVES_EVERY, Deed, Moment
from tests.faults.verdict import table
from tests.support.launching import ROOT, Program, final_tensors, shardrun, started

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TINY = (
    "recipe_args.context=16", "recipe_args.layers=1", "recipe_args.width=16", "recipe_args.heads=2",
    "recipe_args.dropout=0.1", "train.micro_batch_size=2", "train.global_batch_size=8", "train.check_replicas_every=1",
    "schedule.warmup_steps=5", f"checkpoint.every={SAVES_EVERY}", "log.every=1", "eval.every=7", "eval.max_samples=16",
)  # fmt: skip
VARIANTS = {
    "zero2": ("optimizer.strategy=zero2",),
    "zero1": ("optimizer.strategy=zero1",),
    "zero2 in bf16": ("optimizer.strategy=zero2", "precision.parameters=bf16"),
    "zero2 saved in the background": ("optimizer.strategy=zero2", "checkpoint.async=true"),
}
STEPS = 60
_PATIENT = "topology.timeout_s=30"  # a loaded machine may be slow, and that is no fault
_LEFT_S = 2.0
_SCREEN = 20  # lines
_LAST_LINE = "exit code 1 (training failed)\n"
_SHOWN = 2000  # characters of what it said


HEADER = [
    "what happened",
    "cycles",
    "exit codes",
    "updates to make again (median / most)",
    "seconds of a cycle (median / most)",
]


@dataclass
class Tally:
    """What came of all cycles of one kind."""

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Updates that were logged and have to be made again."""


@dataclass
class Report:
    """What came of everything; `wrong` is empty if all is as it should be."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    """The variants whose runs came to their ends and were compared."""
    wrong: list[str] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Of the table, see HEADER."""
        return [
            [
                kind,
                str(len(tally.seconds)),
                ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items())),
                f"{median(tally.lost):.0f} / {max(tally.lost)}",
                f"{median(tally.seconds):.1f} / {max(tally.seconds):.1f}",
            ]
            for kind, tally in self.tallies.items()
        ]

    def text(self) -> str:
        """The table, and what is wrong."""
        compared = ", ".join(f"{count} of {name}" for name, count in Counter(self.runs).items()) or "none"
        end = f"runs compared with a twin that nothing happened to: {compared}; differences and surprises: "
        return "\n".join([table(HEADER, self.rows()), end + (str(len(self.wrong) or "none")), *self.wrong])


class Chaos:
    """Cycles in a folder of their own."""

    def __init__(self, folder: Path, seed: int, steps: int = STEPS) -> None:
        self._folder = folder
        self._seed = seed
        self._steps = steps
        self._twins: dict[str, Path] = {}
        self.report = Report()

    def run(self, cycles: int, tell: Callable[[str], object] = lambda text: None) -> Report:
        """So many cycles; the last run is brought to its end as well."""
        done, number = 0, 0
        while done < cycles:
            variant = list(VARIANTS)[number % len(VARIANTS)]
            run_dir, number = self._folder / f"run-{number}", number + 1
            over = False
            while done < cycles and not over:
                over = self._cycle(done, run_dir, variant, tell)
                done += not over
            if not over:
                self._finish(run_dir, variant)
            self._compare(run_dir, variant)
            tell(f"run {number} ({variant}) is at its end")
        return self.report

    def _command(self, run_dir: Path, variant: str, *words: str) -> list[str]:
        fixed = [f"run.dir={run_dir}", *TINY, *VARIANTS[variant], f"train.steps={self._steps}"]
        fixed += [] if any(word.startswith("topology.timeout_s=") for word in words) else [_PATIENT]
        return shardrun("train", QUICKSTART, *fixed, *words)

    def _cycle(self, number: int, run_dir: Path, variant: str, tell: Callable[[str], object]) -> bool:
        """One cycle; returns whether the run came to its end before anything could happen."""
        before = _last(run_dir)
        at = Moment(f"{self._seed} {number} {before}", before)
        weights = [weight for weight, _ in DEEDS.values()]
        kind = random.Random(f"{self._seed} {number}").choices(list(DEEDS), weights)[0]
        deed = DEEDS[kind][1](at)
        began = time.monotonic()
        with started(self._command(run_dir, variant, *deed.words), self._folder) as program:
            if deed.act is not None:
                deed.act(program)
            code = program.wait(120)
            left = program.left(_LEFT_S)
        told = f"cycle {number} ({kind}{' '.join(['', *deed.words[1:2]])}, from step {before} of {variant})"
        self.report.wrong += [f"{told}: {text}" for text in self._surprises(deed, code, left, program, run_dir, before)]
        if code == 0:
            return True
        tally = self.report.tallies.setdefault(kind, Tally())
        tally.codes[code] += 1
        tally.seconds.append(time.monotonic() - began)
        tally.lost.append(max([0, *(row["step"] - _last(run_dir) for row in read_rows(run_dir / "metrics.jsonl"))]))
        tell(f"{told}: exit code {code}, now at step {_last(run_dir)}, {tally.seconds[-1]:.1f} s")
        return False

    def _surprises(
        self, deed: Deed, code: int, left: dict[int, str], program: Program, run_dir: Path, before: int
    ) -> Iterator[str]:
        if code not in deed.codes:
            yield f"exit code {code}: {program.stderr[-_SHOWN:]}"
        elif code == 1 and (program.stderr.count("\n") > _SCREEN or not program.stderr.endswith(_LAST_LINE)):
            yield f"no screen: {program.stderr[-_SHOWN:]}"
        elif "Traceback" in program.stdout + program.stderr:
            yield f"a traceback: {program.stdout[-_SHOWN:]}{program.stderr[-_SHOWN:]}"
        if left:
            yield f"processes are left: {left}"
        if damaged := [one for one in scan(run_dir) if not one.complete]:
            yield f"damaged checkpoints: {damaged}"
        if _last(run_dir) < before:
            yield f"the last checkpoint is of step {_last(run_dir)} now"

    def _finish(self, run_dir: Path, variant: str) -> None:
        with started(self._command(run_dir, variant), self._folder) as program:
            if code := program.wait(300):
                self.report.wrong.append(f"{run_dir.name} does not come to its end: {code}: {program.stderr}")

    def _compare(self, run_dir: Path, variant: str) -> None:
        if variant not in self._twins:
            self._twins[variant] = self._folder / f"twin-{len(self._twins)}"
            self._finish(self._twins[variant], variant)
        self.report.runs.append(variant)
        if differing := differences(run_dir, self._twins[variant]):
            self.report.wrong.append(f"{run_dir.name} ({variant}) ends differently: {', '.join(differing)}")


def differences(run_dir: Path, twin: Path) -> list[str]:
    """In which files or sections of their last checkpoints two runs differ, and whether in their metrics."""
    one, other = final_tensors(run_dir), final_tensors(twin)
    differing = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    differing += [key for key, value in _sections(twin).items() if _sections(run_dir).get(key) != value]
    return differing + (["metrics.jsonl"] if _rows(run_dir) != _rows(twin) else [])


def _last(run_dir: Path) -> int:
    found = newest(run_dir)
    return 0 if found is None else found.step


def _sections(run_dir: Path) -> dict[str, Any]:
    found = newest(run_dir)
    assert found is not None
    manifest, _ = read_manifest(found.path)
    return {key: manifest[key] for key in ("step", "counters", "data", "schedule", "param_sha256")}


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_s")
    return [{k: v for k, v in row.items() if k not in clock} for row in read_rows(run_dir / "metrics.jsonl")]


def main() -> int:
    """Run it from the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Random ends and resumes of a tiny quickstart.")
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--steps", type=int, default=STEPS, help="length of each run in updates")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = Chaos(Path(folder), asked.seed, asked.steps).run(asked.cycles, lambda text: print(text, flush=True))
    print(report.text())
    print(f"{asked.cycles} cycles of seed {asked.seed} in {time.monotonic() - began:.0f} s")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
