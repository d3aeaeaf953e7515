"""What survivors of a kill hold, judged against a fault-free run, and told in a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardrun.comm.faults import STEP_PHASES
from tests.faults.subjects import NOTHING_PENDING, Digest

_CLOSED = "communicator is closed since its first failure"


@dataclass(frozen=True)
class Reference:
    """The fault-free run: by rank, then by steps committed, what it held before the next one."""

    digests: list[list[Digest]]
    step_s: float
    phase_s: dict[str, float]
    """Median seconds that rank 0 spends in a phase at a time."""


@dataclass(frozen=True)
class Survivor:
    """What a rank tells after the step that failed."""

    steps: int
    """Steps that it knows to be committed."""
    digest: Digest
    error: str
    phase: str
    in_doubt: bool
    gradients_kept: bool
    out_at: float
    """Seconds of the epoch at which the step raised."""
    later: str
    """The error of the next call."""
    later_s: float


@dataclass(frozen=True)
class Trial:
    """What came of one kill."""

    shot: str
    died_in: str
    survivors: Mapping[int, Survivor]
    wrong: Sequence[str]
    out_s: Sequence[float]
    """How long after the kill each survivor was out of its step."""

    @property
    def wrong_survivors(self) -> int:
        """How many survivors hold something that they should not, or tell what is not so."""
        return sum(any(told.startswith(f"rank {rank}:") for told in self.wrong) for rank in self.survivors)

    @property
    def apart(self) -> bool:
        """Whether the survivors are a step apart."""
        return len({survivor.steps for survivor in self.survivors.values()}) > 1


def judge(survivors: Mapping[int, Survivor], reference: Reference) -> list[str]:
    """All that is wrong, by rank."""
    found = [told for rank, survivor in survivors.items() for told in _faults_of(rank, survivor, reference)]
    return found + list(_apart(survivors))


def _faults_of(rank: int, survivor: Survivor, reference: Reference) -> Iterator[str]:
    right = reference.digests[rank][survivor.steps]
    if survivor.digest.state != right.state:
        yield f"rank {rank}: state is not that of step {survivor.steps} ({survivor.error})"
    if survivor.gradients_kept and survivor.digest.pending != right.pending:
        yield f"rank {rank}: pending gradients are not those of step {survivor.steps + 1} ({survivor.error})"
    dropped = survivor.error.startswith("StepFailed") and not survivor.gradients_kept
    if dropped and survivor.digest.pending != NOTHING_PENDING:
        yield f"rank {rank}: says that gradients are gone, and has some ({survivor.error})"
    if _CLOSED not in survivor.later:
        yield f"rank {rank}: the next call said {survivor.later!r}"


def _apart(survivors: Mapping[int, Survivor]) -> Iterator[str]:
    """Survivors may be one step apart if the one behind is in doubt; never else."""
    behind, *_, ahead = sorted(survivors.items(), key=lambda held: held[1].steps)
    if behind[1].steps != ahead[1].steps and not (behind[1].in_doubt and ahead[1].steps == behind[1].steps + 1):
        yield f"rank {behind[0]}: at step {behind[1].steps}, in doubt {behind[1].in_doubt}, others at {ahead[1].steps}"


def phase_counts(trials: Sequence[Trial]) -> Counter[str]:
    """How many victims died in each phase."""
    return Counter(trial.died_in for trial in trials)


HEADER = [
    "strategy",
    "kills",
    "survivors wrong",
    "in doubt",
    "trials a step apart",
    "out after ms (median / 95 % / most)",
    "next call refused in ms (median / most)",
    "the victim died in",
]


def row(name: str, trials: Sequence[Trial]) -> list[str]:
    """One line of the table."""
    counts = phase_counts(trials)
    outs = sorted(seconds for trial in trials for seconds in trial.out_s)
    survivors = [survivor for trial in trials for survivor in trial.survivors.values()]
    later = [1000 * survivor.later_s for survivor in survivors]
    return [
        name,
        str(len(trials)),
        f"{sum(trial.wrong_survivors for trial in trials)} of {len(survivors)}",
        str(sum(survivor.in_doubt for survivor in survivors)),
        str(sum(trial.apart for trial in trials)),
        f"{1000 * median(outs):.0f} / {1000 * outs[int(0.95 * (len(outs) - 1))]:.0f} / {1000 * outs[-1]:.0f}",
        f"{median(later):.2f} / {max(later):.2f}",
        " ".join(f"{phase} {counts[phase]}" for phase in STEP_PHASES if counts[phase]),
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their header, columns aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    )
