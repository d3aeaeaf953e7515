"""The peers of torch itself, each as its documentation recommends it.

Each imports its own part of torch when it is made, so that the first step of the others does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardrun.bench.peer import Peer


class DDP(Peer):
    """Replicas that average their gradients in buckets, under backward."""

    configuration = "DistributedDataParallel(gradient_as_bucket_view=True), no_sync() while accumulating"

    def wrap(self, model: nn.Module) -> nn.Module:
        """On a GPU with its number."""
        device = self.work.comm.device
        ids = [device.index] if device.type == "cuda" else None
        self._ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        return self._ddp

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Only the last one is averaged."""
        return nullcontext() if last else self._ddp.no_sync()


class Zero1(DDP):
    """DDP, the state of each parameter with one owner, which sends what it has updated."""

    configuration = (
        f"{DDP.configuration}; ZeroRedundancyOptimizer(parameters_as_bucket_view=True) over the same optimizer class"
    )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Its options go to the optimizer of each owner."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._zero = ZeroRedundancyOptimizer(
            self.work.parameter_groups(),
            optimizer_class=self.work.optimizer_class,
            parameters_as_bucket_view=True,
            **self.work.options,
        )
        return self._zero

    @property
    def stepping(self) -> torch.optim.Optimizer:
        """That of what this rank owns."""
        optimizer: torch.optim.Optimizer = self._zero.optim
        return optimizer


class FSDP2(Peer):
    """Parameters, gradients and state in slices; parameters stay gathered between forward and backward."""

    configuration = (
        "fully_shard(reshard_after_forward=False) of each block and of the root, "
        "set_requires_gradient_sync() while accumulating"
    )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Blocks are the members of every ModuleList."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        comm = self.work.comm
        mesh = init_device_mesh(comm.device.type, (comm.world_size,))
        for one in list(model.modules()):
            if isinstance(one, nn.ModuleList):
                for block in one:
                    fully_shard(block, mesh=mesh, reshard_after_forward=False)
        self._root = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return model

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Only after the last one are gradients reduced."""
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one by one."""
        for path, parameter in super().parameters():
            whole: Any = parameter
            yield path, whole.full_tensor()
