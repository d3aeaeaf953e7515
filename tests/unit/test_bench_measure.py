"""Bytes, times and distances as bench takes them."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from shardrun.bench.measure import Stopwatch, held_bytes, peak_bytes, process_age_s, tensors_in
from shardrun.bench.sameness import distance, same_bits, save_parameters

CPU = torch.device("cpu")


def test_memory_counts_once_however_many_views_it_has() -> None:
    whole = torch.zeros(100)
    held = [whole[:10], whole[10:], None, torch.zeros(3, dtype=torch.bfloat16)]
    assert held_bytes(held) == 400 + 6
    state = {"exp_avg": whole, "step": torch.tensor(1.0), "nested": [(whole[5:],), {"more": torch.zeros(2)}], "n": 3}
    assert held_bytes(tensors_in(state)) == 400 + 4 + 8


def test_peak_memory_is_that_of_what_was_held_even_if_it_is_gone() -> None:
    block = torch.ones(100 << 18)  # 100 MiB, touched
    during = peak_bytes(CPU)
    assert during >= block.nbytes
    del block
    assert peak_bytes(CPU) > during - (1 << 20)  # the kernel counts pages in batches


def test_a_window_lasts_from_the_end_of_the_one_before_without_what_is_put_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 11.0, 13.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch(CPU)
    assert stopwatch.first_window_s is None
    for aside in (0.0, 0.25, 0.25, 1.0):
        stopwatch.mark(aside)
    assert stopwatch.windows_s() == [0.75, 2.0, 2.25]
    assert stopwatch.first_window_s == pytest.approx(process_age_s(), abs=5)


def test_the_distance_is_in_parts_of_the_way_that_the_reference_went(tmp_path: Path) -> None:
    start = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    path = tmp_path / "reference.safetensors"
    reference = {"a": torch.full((3, 2), 3.0).t(), "b": torch.full((4,), 4.0)}
    save_parameters(reference.items(), None)
    assert not path.exists()
    save_parameters(reference.items(), path)
    assert distance(reference.items(), path, start) == 0.0
    way = math.sqrt(6 * 9 + 4 * 9)
    other = {**reference, "b": torch.tensor([4.0, 4.0, 4.0, 4.5])}
    assert distance(other.items(), path, start) == pytest.approx(0.5 / way)
    assert distance(start.items(), path, start) == pytest.approx(1.0)
    assert math.isnan(distance({**reference, "b": torch.full((4,), math.nan)}.items(), path, start))
    assert distance(reference.items(), path, reference) == 0.0
    assert distance(other.items(), path, reference) == math.inf
    assert distance(other.items(), None, {}) == 0.0


def test_bits_are_compared_not_values() -> None:
    assert same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
