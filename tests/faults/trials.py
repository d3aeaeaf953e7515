"""Kill one of three ranks in the middle of a step, many times, and judge what the survivors hold.

A survivor is right if its parameters, optimizer state and masters are bit for bit those of a fault-free run after as
many steps as the survivor has committed, and its pending gradients those of that run too (or gone, and said so).

The moment is drawn from the wall time of some steps, and the parent kills; or it is aimed, by a plan: where a phase or
a collective begins, or some time after. Where the victim was when it died is read from the small mapped file that it
keeps, never taken from what was aimed at.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from statistics import median

import shardrun as sr
from shardrun.comm.faults import STEP_PHASES, plan
from shardrun.errors import CommunicatorError, ShardrunError, StepFailed
from shardrun.run.status import Status, StatusFile, read
from tests.faults.subjects import Digest, Subject, digest_of, make_subject
from tests.faults.verdict import Reference, Survivor, Trial, judge, phase_counts
from tests.support.rank_process import mark
from tests.support.ranks import RankFailed, run_ranks, start_ranks

WORLD_SIZE = 3
WANTED = {"reduce": 10, "gather": 10, "vote": 10}
"""Kills in these phases that a long run needs at least."""
TIMEOUT_S = 5.0
_WARM = 2  # steps before a kill, so that there is state to lose
_STEPS = 30  # a trial whose victim is alive after so many is void
_WINDOW = 3  # a random moment lies in the wall time of so many steps
_TRIALS_OF_A_SEED = 20


@dataclass(frozen=True)
class Shot:
    """How a victim is to die: by a plan (`text`), or killed by the parent `delay_s` after the warm steps."""

    victim: int
    text: str = ""
    delay_s: float = 0.0


# ---- in the ranks --------------------------------------------------------------------------------------------------


def _walk(comm: sr.Communicator, name: str, seed: int) -> tuple[list[Digest], float, dict[str, float]]:
    """The fault-free run on one rank: digests, seconds of a step, and of a phase at a time."""
    subject = make_subject(name, comm, seed)
    digests: list[Digest] = []
    steps: list[float] = []
    spent: dict[str, list[float]] = {}
    came: list[tuple[str, float]] = []

    def note(phase: str, collective: int) -> None:
        now = time.monotonic()
        before, since = came[-1]
        spent.setdefault(before, []).append(now - since)
        came.append((phase, now))

    for step in range(_STEPS):
        subject.backward()
        digests.append(digest_of(subject.look()))
        came.append(("between", time.monotonic()))
        comm.observer = note if step >= _WARM else None
        started = time.monotonic()
        subject.step()
        steps.append(time.monotonic() - started)
    return digests, median(steps[_WARM:]), {phase: median(times) for phase, times in spent.items()}


def _step_until_it_fails(comm: sr.Communicator, name: str, seed: int, shot: Shot, status_path: str) -> Survivor:
    subject = make_subject(name, comm, seed)
    if comm.rank == shot.victim:
        status = StatusFile(Path(status_path))
        comm.observer = lambda phase, collective: status.set(subject.steps + 1, phase, collective)
        if shot.text:
            plan(shot.text, comm.world_size).install(comm)
    for step in range(_STEPS):
        subject.backward()
        if step == _WARM:
            mark("stepping")
        try:
            subject.step()
        except (StepFailed, CommunicatorError) as error:
            return _told(subject, error, time.time())
    raise AssertionError("nobody died")


def _told(subject: Subject, error: ShardrunError, out_at: float) -> Survivor:
    seen = digest_of(subject.look())
    started = time.monotonic()
    later = ""
    try:
        subject.step()
    except ShardrunError as again:
        later = f"{type(again).__name__}: {again}"
    later_s = time.monotonic() - started
    phase, in_doubt, kept = "", False, False
    if isinstance(error, StepFailed):
        phase, in_doubt, kept = error.phase, error.in_doubt, error.gradients_kept
    told = f"{type(error).__name__}: {error}"
    return Survivor(subject.steps, seen, told, phase, in_doubt, kept, out_at, later, later_s)


# ---- in the parent -------------------------------------------------------------------------------------------------


def reference_of(name: str, seed: int) -> Reference:
    """Run the strategy called `name` without faults."""
    ranks = run_ranks(WORLD_SIZE, _walk, name, seed, debug="OFF")
    return Reference([digests for digests, _, _ in ranks], ranks[0][1], ranks[0][2])


def fire(name: str, seed: int, shot: Shot, reference: Reference) -> Trial | None:
    """One trial; None if the victim lived, so that it has to be made again."""
    with tempfile.NamedTemporaryFile(prefix="shardrun-victim-") as file:
        survivors, status, killed_at = _kill(name, seed, shot, file.name)
    if survivors is None:
        return None
    outs = [max(0.0, survivor.out_at - killed_at) for survivor in survivors.values()]
    return Trial(str(shot), status.phase, survivors, judge(survivors, reference), outs)


def _kill(name: str, seed: int, shot: Shot, path: str) -> tuple[Mapping[int, Survivor] | None, Status, float]:
    """What the survivors tell (None if nobody died), where the victim was last, and when it died."""
    body, timeout_s = _step_until_it_fails, TIMEOUT_S
    with start_ranks(WORLD_SIZE, body, name, seed, shot, path, comm_timeout_s=timeout_s, debug="OFF") as ranks:
        killed_at = 0.0
        if not shot.text:
            ranks.wait_for_mark(shot.victim, "stepping")
            time.sleep(shot.delay_s)
            killed_at = time.time()
            ranks.send_signal(shot.victim, signal.SIGKILL)
        outcomes = ranks.collect(timeout_s=4 * TIMEOUT_S + 30)
    status = read(Path(path))
    if outcomes[shot.victim].killed_by != signal.SIGKILL:
        return None, status, 0.0
    for outcome in outcomes:
        if outcome.rank != shot.victim and not outcome.ok:
            raise RankFailed(outcome.rank, outcome.error or f"left with exit code {outcome.exit_code}")
    if shot.text:
        killed_at = status.since + plan(shot.text).faults[0].after_s
    return {outcome.rank: outcome.value for outcome in outcomes if outcome.rank != shot.victim}, status, killed_at


def shots(draw: random.Random, reference: Reference, count: int) -> list[Shot]:
    """`count` ways to die: 3 of 5 at a random moment; the others where phases begin, and inside of three."""
    passed = reference.phase_s
    firsts = [f"{phase}:1" for phase in sorted(WANTED)]
    places = [f"at {place}" for place in (*STEP_PHASES, *firsts) if place.partition(":")[0] in passed]
    draw.shuffle(places)
    phases = [phase for phase in sorted(WANTED) if phase in passed]
    draw.shuffle(phases)
    inside = (_inside(draw, reference, phase) for phase in cycle(phases))
    aimed = chain(*zip(places, inside, strict=False), inside)
    found = [_aimed(draw.randrange(WORLD_SIZE), where) for where, _ in zip(aimed, range(2 * count // 5), strict=False)]
    while len(found) < count:
        found.append(Shot(draw.randrange(WORLD_SIZE), delay_s=draw.uniform(0.0, _WINDOW * reference.step_s)))
    draw.shuffle(found)
    return found


def _aimed(victim: int, where: str) -> Shot:
    return Shot(victim, f"kill rank {victim} {where} of step {_WARM + 1}")


def _inside(draw: random.Random, reference: Reference, phase: str) -> str:
    """A moment after the first collective of `phase` began."""
    return f"{draw.uniform(1e-6, reference.phase_s[phase]):.6f} s after {phase}:1"


def run_trials(name: str, seed: int, count: int, wanted: Mapping[str, int] | None = None) -> list[Trial]:
    """`count` trials of the strategy called `name`, and more inside the phases of which `wanted` asks for more."""
    draw = random.Random(f"{name} {seed}")
    references = {seed: reference_of(name, seed)}
    trials = []
    for number, shot in enumerate(shots(draw, references[seed], count)):
        own = seed + number // _TRIALS_OF_A_SEED
        if own not in references:
            references[own] = reference_of(name, own)
        trials.append(_made(name, own, shot, references[own]))
    for phase, least in (wanted or {}).items():
        while phase_counts(trials)[phase] < least:
            shot = _aimed(draw.randrange(WORLD_SIZE), _inside(draw, references[seed], phase))
            trials.append(_made(name, seed, shot, references[seed]))
    return trials


def _made(name: str, seed: int, shot: Shot, reference: Reference) -> Trial:
    for _ in range(3):
        trial = fire(name, seed, shot, reference)
        if trial is not None:
            return trial
    raise AssertionError(f"{name}: the victim lived three times: {shot}")
