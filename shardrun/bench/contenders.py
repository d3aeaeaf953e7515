"""Who runs side by side, by name, and what a config must be for the comparison to mean anything. No torch here."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator

from shardrun.config.matrices import Factory, Muon
from shardrun.config.schema import Config
from shardrun.errors import ConfigError, UsageError

COMPUTE, SHARDRUN, PLAIN = "compute", "shardrun", "plain"
WHAT = {
    COMPUTE: "the floor: forward, backward and the whole optimizer on every rank, nothing sent",
    SHARDRUN: "the trainer of `shardrun train` with its log, without saves and validation",
    PLAIN: "a plain torch loop",
    "ddp": "DistributedDataParallel",
    "zero1": "DistributedDataParallel with ZeroRedundancyOptimizer",
    "fsdp2": "fully_shard",
    "deepspeed": "DeepSpeed, ZeRO-2",
}
PEERS = ("ddp", "zero1", "fsdp2", "deepspeed")
"""Of several ranks. At world size 1 there is one peer, `plain`."""
_INSTALL = {"deepspeed": "pip install 'shardrun[bench]'"}


def chosen(against: str | None, world_size: int) -> tuple[str, ...]:
    """The peers that `against`, names with commas between, asks for; without it all. UsageError for an unknown one."""
    known = PEERS if world_size > 1 else (PLAIN,)
    names = known if against is None else tuple(dict.fromkeys(filter(None, map(str.strip, against.split(",")))))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            where = "several ranks" if world_size > 1 else "world size 1"
            hint = f"did you mean {near[0]}?" if near else f"the peers of {where} are {', '.join(known)}"
            raise UsageError(f"--against: no peer {name!r} for {where}; {hint}")
    return names


def how_to_install(name: str) -> str | None:
    """The command that installs what the contender needs and this Python lacks; None if nothing is missing."""
    return _INSTALL[name] if name in _INSTALL and importlib.util.find_spec(name) is None else None


def at_world_size(config: Config, world_size: int | None) -> Config:
    """The config on so many ranks, each with as much work as before; ConfigError if that cannot be."""
    topology, train = config.topology, config.train
    if world_size is None or world_size == topology.world_size:
        return config
    batch, rest = divmod(train.global_batch_size * world_size, topology.world_size)
    if rest or batch % train.micro_batch_size:
        raise ConfigError(
            f"--world {world_size}: train.global_batch_size {train.global_batch_size} over {topology.world_size} ranks "
            f"cannot be scaled to {world_size} in micro-batches of {train.micro_batch_size}; give another batch size"
        )
    update = {
        "topology": topology.model_copy(update={"world_size": world_size}),
        "train": train.model_copy(update={"global_batch_size": batch}),
    }
    return config.model_copy(update=update)


def refuse_incomparable(config: Config) -> None:
    """ConfigError with everything in the config that not every contender can do alike."""
    if problems := list(_problems(config)):
        raise ConfigError([f"bench: {text}" for text in problems])


def _problems(config: Config) -> Iterator[str]:
    train, world_size = config.train, config.topology.world_size
    if config.groups or config.topology.exchanging:
        yield "groups and topology.axes: the peers have one group of parameters, replicated on all ranks"
    elif isinstance(config.optimizer, Muon | Factory):
        yield (
            "optimizer: the peers cut or replicate any optimizer alike only where it is an elementwise one of "
            "torch.optim; compare with adamw or another one"
        )
    if config.precision.parameters != "fp32":
        yield (
            f"precision.parameters: {config.precision.parameters}: the peers keep no FP32 masters as ours; compare "
            "with precision.parameters=fp32 precision.autocast=bf16"
        )
    if train.global_batch_size % (train.micro_batch_size * world_size):
        yield (
            f"train.global_batch_size: {train.global_batch_size} is no multiple of {world_size} ranks times "
            f"train.micro_batch_size {train.micro_batch_size}; the peers need equal batches on all ranks"
        )
