"""The loader: the same micro-batches for any world, any number of workers, and from any position."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from shardrun.data.loader import MicroBatchLoader
from shardrun.data.order import Window
from shardrun.data.seeding import rng_states
from shardrun.errors import ShardrunError, UsageError

Seen = list[tuple[int, int, Any]]  # (position after the window, micro-batch number, batch)


class Noisy:
    """Item i is (i, a draw from each stream): augmentation as users write it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), np.random.randn(), torch.rand(()).item()], dtype=torch.float64)


class Failing(Noisy):
    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 5:
            raise KeyError("no such picture")
        return super().__getitem__(index)


def loader(dataset: object, *, rank: int = 0, world_size: int = 1, **settings: Any) -> MicroBatchLoader:
    chosen = {"seed": 7, "micro_batch_size": 2, "global_batch_size": 6, **settings}
    return MicroBatchLoader(dataset, rank=rank, world_size=world_size, **chosen)


def collected(source: MicroBatchLoader, position: int, stop: int) -> Seen:
    found = []
    for window, share in source.windows(position, stop):
        found += [(window.next_position, number, batch) for number, batch in share]
    return found


def run_out(windows: Iterator[tuple[Window, Iterator[tuple[int, Any]]]]) -> None:
    for _, share in windows:
        list(share)


def assert_equal(left: Seen, right: Seen) -> None:
    assert [(position, number) for position, number, _ in left] == [(p, number) for p, number, _ in right]
    for (_, _, (ids, draws)), (_, _, (other_ids, other_draws)) in zip(left, right, strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(draws, other_draws)


def test_workers_change_nothing() -> None:
    straight = collected(loader(Noisy(11)), 0, 33)
    assert len(straight) == 18  # three epochs of windows with 3 and 3 micro-batches
    for workers, prefetch in ((1, 1), (2, 3)):
        assert_equal(collected(loader(Noisy(11), workers=workers, prefetch=prefetch), 0, 33), straight)


def test_every_world_size_sees_the_same_micro_batches() -> None:
    alone = collected(loader(Noisy(17)), 0, 34)
    for world_size in (2, 3, 5):
        together: Seen = []
        for rank in range(world_size):
            together += collected(loader(Noisy(17), rank=rank, world_size=world_size), 0, 34)
        assert_equal(sorted(together, key=lambda seen: seen[:2]), alone)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_position_continues_the_straight_run(workers: int) -> None:
    straight = collected(loader(Noisy(12), rank=1, world_size=2), 0, 36)
    positions = sorted({position for position, _, _ in straight})
    assert positions == [6, 12, 18, 24, 30, 36]
    for position in positions[:-1]:  # inside an epoch and on its end, in later epochs too
        tail = [seen for seen in straight if seen[0] > position]
        assert_equal(collected(loader(Noisy(12), rank=1, world_size=2, workers=workers), position, 36), tail)


def test_augmentation_differs_between_epochs_and_samples() -> None:
    drawn = [tuple(row.tolist()) for _, _, (_, draws) in collected(loader(Noisy(12)), 0, 24) for row in draws]
    assert len(set(drawn)) == 24


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_leaves_the_callers_streams_alone(workers: int) -> None:
    random.gauss(0, 1)
    np.random.randn()
    before = rng_states()
    collected(loader(Noisy(12), workers=workers), 0, 24)
    after = rng_states()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_failed_fetch_leaves_the_streams_alone_too() -> None:
    before = rng_states()
    with pytest.raises(KeyError):
        collected(loader(Failing(12)), 0, 12)
    assert all(torch.equal(state, before[name]) for name, state in rng_states().items())


def test_random_collation_is_seeded_by_the_micro_batch() -> None:
    def masked(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index for index, _ in samples]), torch.rand(len(samples))

    straight = collected(loader(Noisy(12), collate=masked), 0, 24)
    assert_equal(collected(loader(Noisy(12), collate=masked, workers=2), 0, 24), straight)
    masks = [tuple(mask.tolist()) for _, _, (_, mask) in straight]
    assert len(set(masks)) == len(masks)


def ids(source: MicroBatchLoader, position: int, stop: int) -> list[list[float]]:
    """Per window, the values this rank gets."""
    return [[x for _, batch in share for x in batch.tolist()] for _, share in source.windows(position, stop)]


def in_turn(values: list[float], rank: int, micro: int, per_window: int, **settings: Any) -> MicroBatchLoader:
    return loader(
        values,
        rank=rank,
        world_size=2,
        micro_batch_size=micro,
        global_batch_size=per_window,
        shuffle=False,
        **settings,
    )


def window_means(ranks: list[list[list[float]]]) -> list[float]:
    """The exact mean of all tokens of each window: TOY's gradient."""
    return [sum(map(sum, shares)) / sum(map(len, shares)) for shares in zip(*ranks, strict=True)]


def test_c005_short_last_window() -> None:
    shares = [ids(in_turn([1.0, 2, 3, 4, 5, 6, 7], rank, 1, 4), 0, 7) for rank in range(2)]
    assert shares == [[[1, 2], [5, 6]], [[3, 4], [7]]]
    assert window_means(shares) == [2.5, 6.0]


def test_c107_uneven_ranks() -> None:
    shares = [ids(in_turn([1.0, 2, 3, 4, 5], rank, 1, 2), 0, 5) for rank in range(2)]
    assert shares == [[[1], [3], [5]], [[2], [4], []]]  # the last window has nothing for rank 1, which still takes part
    assert window_means(shares) == [1.5, 3.5, 5.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu looks at the memory itself")
def test_page_locked_memory_is_asked_for_by_name() -> None:
    asked = loader(Noisy(6), global_batch_size=2, shuffle=False, pin=True)
    with pytest.warns(UserWarning, match="pin_memory.*no accelerator"):
        found = collected(asked, 0, 6)
    assert [batch[0].tolist() for _, _, batch in found] == [[0, 1], [2, 3], [4, 5]]


def test_c107_dropping_only_when_asked_and_counted() -> None:
    dropping = in_turn([1.0, 2, 3, 4, 5], 0, 1, 2, drop_last=True)
    assert ids(dropping, 0, 5) == [[1], [3]]
    assert [window.dropped for window, _ in dropping.windows(0, 5)] == [0, 1]


def test_c108_left_over_micro_batches_stay_in_their_epoch() -> None:
    both_ranks = [1.0, 2, 1, 2, 3, 4, 3, 4, 5, 5]
    shares = [ids(in_turn(both_ranks, rank, 1, 4), 0, 20) for rank in range(2)]
    assert shares[0] == shares[1] == [[1, 2], [3, 4], [5]] * 2
    assert sum(window_means(shares)) == 20


def test_c021_resume_in_a_later_epoch_goes_on_with_the_same_ids() -> None:
    for rank in range(2):
        source = loader([float(i) for i in range(12)], rank=rank, world_size=2, micro_batch_size=1, global_batch_size=2)
        straight = ids(source, 0, 36)
        assert straight[0:6] != straight[6:12]
        assert ids(source, 9 * 2, 36) == straight[9:]


def test_c023_every_sample_once_per_epoch_after_a_resume() -> None:
    source = loader([float(i) for i in range(10)], micro_batch_size=1, global_batch_size=1)
    history = ids(source, 0, 4) + ids(source, 4, 30)
    assert sorted(x for window in history for x in window) == sorted([float(i) for i in range(10)] * 3)


def test_micro_batches_left_untaken_do_not_shift_the_next_window() -> None:
    source = loader([float(i) for i in range(12)], shuffle=False)
    first = [next(share) for _, share in source.windows(0, 12)]
    assert [(number, batch.tolist()) for number, batch in first] == [(0, [0, 1]), (0, [6, 7])]


def test_a_stop_cuts_the_last_window() -> None:
    source = loader([float(i) for i in range(12)], shuffle=False)
    windows = [(window.next_position, [b.tolist() for _, b in share]) for window, share in source.windows(0, 9)]
    assert windows == [(6, [[0, 1], [2, 3], [4, 5]]), (9, [[6, 7], [8]])]


def test_prefetching_leaves_no_trace() -> None:
    source = loader(Noisy(12), workers=2, prefetch=4)
    windows = source.windows(0)
    window, share = next(windows)
    first = [(window.next_position, number, batch) for number, batch in share]
    source.close()
    assert list(windows) == []
    assert_equal(first + collected(loader(Noisy(12)), window.next_position, 12), collected(loader(Noisy(12)), 0, 12))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Stream(), "Stream has no item by index"),
        (iter([1]), "list_iterator has no item by index"),
        (type("Endless", (), {"__getitem__": lambda self, i: i})(), "Endless has no length"),
        ([], "list is empty: 0 samples"),
    ],
)
def test_what_is_no_data_set_is_refused(dataset: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader(dataset)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": -1}, "data.workers -1"),
        ({"prefetch": 0}, "data.prefetch 0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world size 2"),
        ({"drop_last": True, "global_batch_size": 13}, "drops all"),
        ({"micro_batch_size": 0}, "micro_batch_size 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader(Noisy(12), **settings)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(UsageError, match="position -1"):
        next(loader(Noisy(12)).windows(-1))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_an_item_shows_the_users_line(workers: int) -> None:
    source = loader(Failing(12), shuffle=False, workers=workers)
    windows = source.windows(0)
    with pytest.raises(KeyError) as failure:
        run_out(windows)
    text = "".join(str(part) for part in (failure.value, *getattr(failure.value, "__notes__", [])))
    assert "no such picture" in text
    assert "sample 5 of epoch 1 (Failing)" in text
    lines = text if workers else str(failure.getrepr())
    assert 'raise KeyError("no such picture")' in lines
    source.close()


def test_the_identity_of_the_data_set_is_passed_on() -> None:
    dataset = Noisy(3)
    assert loader(dataset).identity is None
    dataset.identity = "abc"  # type: ignore[attr-defined]
    assert loader(dataset).identity == "abc"
    assert loader(dataset).samples == 3


def test_signals_to_the_group_leave_the_workers_at_work() -> None:
    others = set(child_pids(os.getpid()))  # the forkserver of tests with ranks, for one
    source = loader(Noisy(600), workers=2, global_batch_size=2)
    windows = source.windows(0)
    for _ in range(4):  # until each of the workers has shown that it is up
        _, share = next(windows)
        list(share)
    children = set(child_pids(os.getpid())) - others
    assert len(children) == 2
    for child in children:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(child, number)
    for _ in range(40):
        _, share = next(windows)
        list(share)
    source.close()
    assert not children & set(child_pids(os.getpid()))


def test_the_reaction_to_a_dying_child_is_left_as_it_was() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: seen.append(number))
    try:
        handler = signal.getsignal(signal.SIGCHLD)
        collected(loader(Noisy(12), workers=1), 0, 12)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


PARENT = """
import time, torch
from shardrun.data.loader import MicroBatchLoader

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index > {quick}: time.sleep(600)
        return index

loader = MicroBatchLoader(Slow(), seed=0, rank=0, world_size=1, micro_batch_size=1, global_batch_size=1,
                          shuffle=False, workers=2, prefetch=2)
windows = loader.windows(0)
_, share = next(windows)
list(share)
print("started", flush=True)
{end}
"""


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_parent(quick: int, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with two workers inside their data set's code, and the workers' numbers."""
    command = [sys.executable, "-c", PARENT.format(quick=quick, end=end)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    children = child_pids(parent.pid)
    assert len(children) == 2
    return parent, children


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"workers {pids} outlive their parent"
        time.sleep(0.05)


def test_workers_die_with_a_killed_parent() -> None:
    parent, children = start_parent(quick=0, end="time.sleep(600)")
    with parent:
        parent.kill()
        wait_until_gone(children, 5)


def test_a_parent_that_leaves_without_closing_ends_at_once() -> None:
    parent, children = start_parent(quick=999, end="")
    with parent:
        assert parent.wait(timeout=20) == 0
    wait_until_gone(children, 1)


def test_a_worker_stuck_in_user_code_does_not_keep_the_parent_from_ending() -> None:
    parent, children = start_parent(quick=0, end="loader.close()")
    with parent:
        assert parent.wait(timeout=10) == 0
    wait_until_gone(children, 1)


def test_a_killed_worker_is_an_error_and_no_hang() -> None:
    source = loader(Noisy(600), workers=1, global_batch_size=2)
    windows = source.windows(0)
    _, share = next(windows)
    list(share)
    for child in child_pids(os.getpid()):
        os.kill(child, signal.SIGKILL)
    with pytest.raises(ShardrunError, match=r"data worker \d+ ended with exit code -9"):
        run_out(windows)
    source.close()
