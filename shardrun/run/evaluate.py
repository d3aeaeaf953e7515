"""Validation: the exact weighted mean over all ranks, leaving every random stream of the training as it was."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from shardrun.data.loader import MicroBatchLoader
from shardrun.data.seeding import Purpose, derive_seed, restore_rng, rng_states, seed_all
from shardrun.run.build import Built
from shardrun.run.forward import loss_of, sum_over_ranks

_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` (the sum of all weights); bits per byte where the recipe says what a token is."""

    loss: float
    tokens: int
    bits_per_byte: float | None


class Evaluator:
    """Goes once over the val split. Made when it is first needed; every rank makes and calls it."""

    def __init__(self, built: Built) -> None:
        config = built.config
        dataset = built.recipe.build_data("val")
        limit = config.eval.max_samples
        self.built = built
        self._loader = MicroBatchLoader(
            dataset,
            built.recipe.collate,
            seed=config.run.seed,
            rank=built.comm.rank,
            world_size=built.comm.world_size,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.micro_batch_size * built.comm.world_size * _MICRO_BATCHES,
            shuffle=False,
        )
        self._stop = self._loader.samples if limit is None else min(limit, self._loader.samples)

    @torch.no_grad()
    def run(self) -> Evaluation:
        """The mean loss over the split; collective."""
        built, streams = self.built, rng_states()
        training = built.model.training
        built.model.eval()
        loss, weight = 0.0, 0
        for window, share in self._loader.windows(0, self._stop):
            for number, batch in share:
                seed_all(derive_seed(Purpose.EVALUATION, built.config.run.seed, window.start, number))
                loss_sum, count = loss_of(built, batch)
                loss, weight = loss + float(loss_sum), weight + int(count)
        built.model.train(training)
        restore_rng(streams)
        total, tokens = sum_over_ranks(built.comm, "validation", loss, weight)
        mean = total / tokens if tokens else math.nan
        return Evaluation(mean, tokens, self._bits_per_byte(mean))

    def _bits_per_byte(self, mean: float) -> float | None:
        per_token: Any = self.built.recipe.bytes_per_token
        return None if per_token is None else mean / (math.log(2) * per_token)
