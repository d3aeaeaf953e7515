"""What being fail-closed costs: the step of ZeRO-2 against the same in place, alternating step by step in one run.

    python -m tests.faults.cost [--pairs 200] [--models quickstart 60m 83m] [--stream]

Two ranks hold two copies of a model, one stepped by SelectedZero2, the other by unsafe.InPlaceGather: same layout,
reduction, norm and kernels, without agreement, proposal, staging and vote. Both see the same data, so that both hold
the same bits at the end. A pair is one training step of each; who goes first changes from pair to pair. Wall time is
that of the slower rank, CPU time that of both ranks with all their threads. The interval is that of order statistics.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

import shardrun as sr
from recipes import gpt
from shardrun.bench.interval import interval
from tests.faults.unsafe import InPlaceGather
from tests.faults.verdict import table
from tests.support.models import seeded
from tests.support.ranks import run_ranks
from tests.support.sessions import option_groups, same_bits

WORLD_SIZE = 2
_WARM = 3


@dataclass(frozen=True)
class Load:
    """A model and what one rank does in a window."""

    args: gpt.Args
    micro_batch: int
    accumulate: int


LOADS = {
    # configs/quickstart.yaml: 32 samples of 64 tokens on two ranks, two micro-batches on each
    "quickstart": Load(gpt.Args(context=64, layers=4, width=96, heads=4), 8, 2),
    # few tokens for its size, which makes the step itself weigh more than it would in a real run
    "60m": Load(gpt.Args(context=128, layers=10, width=704, heads=11), 2, 1),
    # configs/bench-83m.yaml
    "83m": Load(gpt.Args(context=256, layers=12, width=768, heads=12, mlp="gelu"), 1, 1),
}
_PAIRS = {"quickstart": 200, "60m": 40, "83m": 40}


@dataclass(frozen=True)
class Times:
    """Seconds of one training step on one rank: wall and CPU, of all of it and of the step alone."""

    wall: float
    cpu: float
    step_wall: float
    step_cpu: float


class _Trained:
    """One copy of the model with its optimizer."""

    def __init__(self, comm: sr.Communicator, load: Load, cls: type[sr.SelectedZero2], *, streams: bool) -> None:
        self.comm, self.load = comm, load
        self.model = seeded(1, lambda: gpt.build_model(load.args))
        session = sr.DataParallel(comm, self.model)
        self.zero2 = cls(
            session,
            torch.optim.AdamW,
            option_groups=option_groups(session.order, {"*norm.weight": {"weight_decay": 0.0}}),
            lr=2e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            stream_gradients=streams,
        )

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Times:
        """One window and its step."""
        self.comm.vote()  # both ranks begin together
        wall, cpu = time.perf_counter(), time.process_time()
        weight = 0
        for number, batch in enumerate(batches, 1):
            loss_sum, tokens = gpt.loss(self.model, batch)
            weight += int(tokens)
            with self.zero2.window(local_weight=weight, last=number == len(batches)):
                torch.autograd.backward(loss_sum)
        step_wall, step_cpu = time.perf_counter(), time.process_time()
        if isinstance(self.zero2, InPlaceGather):
            self.zero2.unsafe_step(local_weight=weight, max_grad_norm=1.0)
        else:
            self.zero2.step(local_weight=weight, max_grad_norm=1.0)
        end_wall, end_cpu = time.perf_counter(), time.process_time()
        return Times(end_wall - wall, end_cpu - cpu, end_wall - step_wall, end_cpu - step_cpu)


def _alternate(
    comm: sr.Communicator, name: str, pairs: int, streams: bool
) -> tuple[list[tuple[Times, Times]], dict[str, int], int]:
    """Times of `pairs` pairs (safe, unsafe), bytes of gradient memory of the safe one, and how many parameters."""
    load = LOADS[name]
    safe, unsafe = (_Trained(comm, load, cls, streams=streams) for cls in (sr.SelectedZero2, InPlaceGather))
    found = []
    for pair in range(_WARM + pairs):
        batches = [_batch(load, comm.rank, load.accumulate * pair + k) for k in range(load.accumulate)]
        first, second = (safe, unsafe) if pair % 2 else (unsafe, safe)
        times = {first: first.train(batches), second: second.train(batches)}
        found.append((times[safe], times[unsafe]))
    for one, other in zip(safe.model.parameters(), unsafe.model.parameters(), strict=True):
        assert same_bits(one, other), "the two steps do not compute the same"
    return found[_WARM:], safe.zero2.gradient_nbytes, _numel(safe.model)


def _batch(load: Load, rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * number + rank)
    tokens = torch.randint(0, gpt.VOCABULARY, (load.micro_batch, load.args.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _told(pairs: Sequence[tuple[float, float]]) -> list[str]:
    """Milliseconds of both, and the ratio with its interval."""
    middle, low, high = interval([safe / unsafe for safe, unsafe in pairs])
    safe_ms, unsafe_ms = (1000 * median(side) for side in zip(*pairs, strict=True))
    return [f"{safe_ms:.1f}", f"{unsafe_ms:.1f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"]


def measure(name: str, pairs: int, *, streams: bool) -> str:
    """Run it and tell of it."""
    ranks = run_ranks(WORLD_SIZE, _alternate, name, pairs, streams, timeout_s=7200, comm_timeout_s=600, debug="OFF")
    each = [held for held, _, _ in ranks]

    def over_ranks(
        join: Callable[[Sequence[float]], float], pick: Callable[[Times], float]
    ) -> list[tuple[float, float]]:
        joined = []
        for of_ranks in zip(*each, strict=True):
            safe, unsafe = (join([pick(times[k]) for times in of_ranks]) for k in (0, 1))
            joined.append((safe, unsafe))
        return joined

    rows = [
        ["training step, wall", *_told(over_ranks(max, lambda times: times.wall))],
        ["training step, CPU of both ranks", *_told(over_ranks(sum, lambda times: times.cpu))],
        ["step alone, wall", *_told(over_ranks(max, lambda times: times.step_wall))],
        ["step alone, CPU of both ranks", *_told(over_ranks(sum, lambda times: times.step_cpu))],
    ]
    numel, memory = ranks[0][2], ranks[0][1]
    kept = "streamed" if streams else "kept"
    title = f"{name}: {numel:,} parameters, {WORLD_SIZE} ranks, gradients {kept}, {pairs} pairs"
    held = ", ".join(f"{what} {nbytes / numel:.2f}" for what, nbytes in memory.items())
    header = ["", "fail-closed ms", "in place ms", "ratio (95 % interval of the median)"]
    return f"{title}\n{table(header, rows)}\nbytes of gradient memory per parameter and rank: {held}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="what being fail-closed costs")
    parser.add_argument("--pairs", type=int, help="pairs of steps (quickstart: 200, others: 40)")
    parser.add_argument("--models", nargs="+", choices=list(LOADS), default=["quickstart", "60m"])
    parser.add_argument("--stream", action="store_true", help="reduce gradients inside backward, as a run does")
    asked = parser.parse_args()
    for name in asked.models:
        print(measure(name, asked.pairs or _PAIRS[name], streams=asked.stream), flush=True)


if __name__ == "__main__":
    main()
