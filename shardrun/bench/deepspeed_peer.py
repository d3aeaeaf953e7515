"""DeepSpeed's ZeRO-2; needs the extra `bench`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardrun.bench.measure import held_bytes, tensors_in
from shardrun.bench.peer import Peer
from shardrun.run.forward import Tally


class DeepSpeed(Peer):
    """Its engine owns model and optimizer; gradients and state are in slices."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The engine, over torch's own optimizer and the process group that is there."""
        os.environ.setdefault("DS_ACCELERATOR", self.work.comm.device.type)  # read when it is imported
        self.configuration = f"deepspeed.initialize(config={json.dumps(self._settings())})"
        self._engine: Any = importlib.import_module("deepspeed").initialize(
            model=model, optimizer=super().make_optimizer(), config=self._settings(), dist_init_required=False
        )[0]
        return self._engine  # type: ignore[no-any-return]

    def _settings(self) -> dict[str, Any]:
        train, world_size = self.work.config.train, self.work.comm.world_size
        on_gpu = self.work.comm.device.type == "cuda"
        # Its own default, of 5e8 elements, is allocated however little there is to send.
        bucket = min(500_000_000, sum(parameter.numel() for parameter in self.work.trained().values()))
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": train.micro_batch_size,
            "gradient_accumulation_steps": train.global_batch_size // (train.micro_batch_size * world_size),
            "gradient_clipping": train.max_grad_norm or 0.0,  # it clips at 1.0 if it is not told
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": on_gpu,  # in a second stream, which a CPU does not have
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
            "zero_allow_untested_optimizer": True,  # an optimizer of torch
        }
        if self.work.config.precision.autocast == "bf16":
            settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return settings

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The one inside the engine."""
        return self._engine.optimizer.optimizer  # type: ignore[no-any-return]

    @contextmanager
    def _counted(self, last: bool) -> Iterator[None]:
        yield
        if not last:
            self._engine.step()  # counts micro-batches; only the last one of a window is an update

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """The engine counts them."""
        return self._counted(last)

    def backward(self, loss_sum: Tensor, weight: int | Tensor, count: int) -> None:
        """The engine divides by the number of micro-batches."""
        self._engine.backward(loss_sum / weight)

    def update(self, step: int, tally: Tally) -> None:
        """Clipping, update and gathering are the engine's."""
        self.work.set_rates(self.optimizer, step)
        self._engine.step()

    def count_gradients(self) -> None:
        """This rank's slices, and what is still whole."""
        whole = [parameter.grad for parameter in self.trained]
        self.gradient_bytes = held_bytes([*whole, *tensors_in(self._engine.optimizer.averaged_gradients)])
