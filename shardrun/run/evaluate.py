"""Validation: the exact weighted mean over all ranks, leaving streams and modes of the training as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardrun.data.seeding import Purpose, derive_seed, restore_rng, rng_states, seed_all
from shardrun.run.build import Built
from shardrun.run.forward import Tally, empty_loss, loss_of, sum_over_ranks


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` (the sum of all weights); bits per byte where the recipe says what a token is."""

    loss: float
    tokens: int
    bits_per_byte: float | None
    stopping: bool
    """Whether any rank was asked to stop in the meantime."""
    whole: bool = True
    """Whether it went over the whole split; else the figures say nothing."""


def evaluate(built: Built, stop_asked: Callable[[], bool] = lambda: False, *, may_leave: bool = False) -> Evaluation:
    """Go once over the val split, which `built` must have, or with `may_leave` until a rank is asked to stop.

    Collective: before each window of the validation all ranks agree to go on.
    """
    loader, limit = built.val_loader, built.config.eval.max_samples
    assert loader is not None
    tally = Tally()
    windows = loader.windows(0, loader.samples if limit is None else min(limit, loader.samples))
    with training_aside(built.model), closing(windows):
        for window, share in windows:
            if may_leave and built.comm.compare("validation goes on", "", sums=[int(stop_asked())]).sums[0]:
                return Evaluation(math.nan, 0, None, stopping=True, whole=False)
            own = 0
            for number, batch in share:
                own += 1
                first = window.start + number * built.config.train.micro_batch_size  # the same for every world size
                seed_all(derive_seed(Purpose.EVALUATION, built.config.run.seed, first))
                tally.add(*loss_of(built, batch))
            empty_loss(built, loader, window, own)
    counts = [int(tally.weight), int(stop_asked())]
    total, (tokens, stopping) = sum_over_ranks(built.comm, "validation", float(tally.loss), counts)
    mean = total / tokens if tokens else math.nan
    per_token = built.recipe.bytes_per_token
    bits = None if per_token is None else mean / (math.log(2) * per_token)
    return Evaluation(mean, tokens, bits, stopping > 0)


@contextmanager
def training_aside(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients; afterwards each module is in its own mode again, and each random
    stream where it was. Whatever of the recipe runs beside the training runs in here."""
    modes = {module: module.training for module in model.modules()}
    streams = rng_states()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        restore_rng(streams)
        for module, training in modes.items():
            if module.training != training:
                module.train(training)  # not the flag alone: a module may do more, such as taking weights apart again
        for module, training in modes.items():
            module.training = training  # what one call did to modules further down
