"""What a config may say: one pydantic model per section.

The models hold plain numbers and texts. What a value means to torch is the business of `run.build`. The text under a
key is its description in the JSON schema that editors show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from shardrun.config.groups import WORLD, Axes, Group, GroupName, Select, axes_problem, replica_problems
from shardrun.config.optimizers import Optimizer
from shardrun.config.schedule import Schedule
from shardrun.config.section import Broken, Count, Natural, Patterns, PlainOptions, Section

SPANS = ("steps", "epochs", "tokens")

Timeout = Annotated[float, Field(gt=0, le=7 * 86400)]
"""As much as a communicator takes."""


class Run(Section):
    """Name, folder and randomness of the run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = "run"
    """Name of the run; the config file's name if not given."""
    dir: Annotated[Path, Field(strict=False)] = Path("runs/run")
    """Folder of the run, relative to where the command is started; runs/<name> if not given."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """All randomness of the run is derived from it."""
    deterministic: bool = True
    """Only deterministic kernels: the same config on the same machine gives the same bits."""


class Train(Section):
    """How long and in which portions."""

    steps: Count | None = None
    """Length of the run in updates. Give exactly one of steps, epochs and tokens."""
    epochs: Count | None = None
    """Length of the run in passes over the data."""
    tokens: Count | None = None
    """Length of the run in tokens (or samples: what the recipe's loss counts)."""
    micro_batch_size: Count
    """Samples that go through the model at once on one rank."""
    global_batch_size: Count
    """Samples per update over all ranks; a multiple of micro_batch_size. The rest is gradient accumulation."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the global gradient norm to this; null: no clipping."""
    missing_gradients: Literal["zero", "error"] = "zero"
    """A selected parameter without a gradient counts as zeros, or refuses the step."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite gradient: stop (exit 6), or skip the update on all ranks."""
    check_replicas_every: Count | None = None
    """Updates between comparisons of all parameters over the ranks, each before an update; null: before saves only."""
    activation_checkpointing: Patterns = ()
    """Globs over module paths whose activations are computed again in backward."""
    accumulate: Literal["local", "sharded"] = "local"
    """Where gradients of several micro-batches add up: local, whole on each rank; or sharded, each rank its slice only,
    with less memory and more to send (one zero2 group, without axes). The last bits differ."""
    stream_gradients: bool = True
    """Where there is one zero2 group, without axes: send gradients off while backward makes them, and keep none, for
    less memory; false: keep them whole up to the step, the same bits. For a parameter that gets its gradient twice."""
    compile: bool = False
    """Model and loss by torch.compile: a minute more at the start, fewer and larger kernels after it."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """One length, and whole micro-batches."""
        lengths = [key for key in SPANS if given.get(key) is not None]
        if not lengths:
            yield Broken("steps", "the run has no length; give one of steps, epochs and tokens")
        for extra in lengths[1:]:
            yield Broken(extra, f"given besides {lengths[0]}; a run has one length (set the other to null)")
        micro, whole = given.get("micro_batch_size"), given.get("global_batch_size")
        if type(micro) is int and type(whole) is int and micro >= 1 and whole >= 1 and whole % micro:
            yield Broken("global_batch_size", f"{whole} is no multiple of train.micro_batch_size, which is {micro}")
        if given.get("accumulate") == "sharded" and given.get("stream_gradients") is False:
            yield Broken("stream_gradients", "false, but train.accumulate: sharded keeps no gradients; use local")


class Data(Section):
    """Order and fetching of the samples."""

    shuffle: bool = True
    """A new order in every epoch, derived from the seed."""
    workers: Natural = 0
    """Loader processes per rank; 0: in the worker itself."""
    prefetch: Count = 2
    """Micro-batches fetched ahead by each loader process."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a global batch."""


class Precision(Section):
    """Number formats."""

    parameters: Literal["fp32", "bf16"] = "fp32"
    """Format of the model's parameters."""
    master_weights: bool = True
    """Keep fp32 masters of 16-bit parameters in the optimizer state."""
    autocast: Literal["none", "bf16"] = "none"
    """Run matrix products in bf16 and keep the parameters as they are."""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """Products of fp32 matrices: in fp32, or where a device can do it in TF32 (high) or bf16 (medium)."""


class Topology(Section):
    """The ranks and how they talk."""

    world_size: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Number of ranks, one process each."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl with one GPU per rank where GPUs are, gloo elsewhere."""
    timeout_s: Timeout = 1800.0
    """Seconds that a rank waits for the others."""
    init_timeout_s: Timeout = 300.0
    """Seconds that a rank waits for the others at the rendezvous, before anything is built."""
    save_timeout_s: Timeout = 3600.0
    """Seconds that a rank waits for the others in a save or a restore, where a slow disk is waited for."""
    axes: Axes = Field(default={})
    """Names and sizes of axes whose product is world_size, the last one fastest; for groups that live on some ranks."""
    threads_per_rank: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of torch per rank. Part of the numerics."""
    allow_non_loopback: bool = False
    """Leave this machine. Trusted networks only: the rendezvous has neither authentication nor encryption."""
    shared_memory: bool = True
    """Ranks of one host read each other's gradients and slices in place (gloo); false: over sockets, the same bits."""
    max_restarts: Natural = 0
    """New worlds that this start may begin after failed ones, each from the newest checkpoint."""
    sync_unselected: bool = False
    """At start, broadcast unselected parameters and buffers that differ between ranks; else refuse."""

    @property
    def exchanging(self) -> bool:
        """Whether ranks may talk along an axis, inside the model."""
        return any(size > 1 for size in self.axes.values())

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """Axes that make up the world."""
        if broken := axes_problem(given.get("axes", {}), given.get("world_size", 1)):
            yield broken


class Checkpoint(Section):
    """When to save and what to keep."""

    every: Count | None = None
    """Updates between saves; null: at the end only."""
    keep: Count = 2
    """Newest checkpoints that stay."""
    keep_every: Count | None = None
    """Besides them each checkpoint whose step is a multiple of this stays; a multiple of every."""
    background: Annotated[bool, Field(alias="async")] = False
    """Write in the background while training goes on; needs host memory for a copy of what a rank writes."""
    split_model: bool = False
    """Every rank writes its share of the model, in a file of its own; else rank 0 writes one file with all of it."""
    resume: Literal["auto", "required"] = "auto"
    """auto: go on if there is something to go on from; required: else it is an error."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """What is to stay has to be saved."""
        every, kept = given.get("every"), given.get("keep_every")
        if type(kept) is not int or kept < 1:
            return
        if every is None:
            yield Broken("keep_every", f"{kept} has no effect without checkpoint.every")
        elif type(every) is int and every >= 1 and kept % every:
            yield Broken("keep_every", f"{kept} is no multiple of checkpoint.every, which is {every}")


class Log(Section):
    """What is written while training."""

    every: Count = 1
    """Updates between log lines."""
    stdout: bool = True
    """Show progress on the screen as well."""
    grad_norm: bool = True
    """Measure the norm of the whole gradient also where nothing is clipped; false saves reading it once more."""


class Eval(Section):
    """Validation on the recipe's val split."""

    every: Count | None = None
    """Updates between validations; null: not during training."""
    at_end: bool = True
    """Validate after the last update."""
    max_samples: Count | None = None
    """Use only the first samples of the split."""


class Config(Section):
    """A training run of shardrun."""

    run: Run = Run()
    recipe: Annotated[str, Field(min_length=1)]
    """What is trained: a Python file (relative to this file) or an importable module."""
    recipe_args: PlainOptions = Field(default={})
    """Arguments of the recipe, checked against its own Args."""
    init_from: Annotated[Path, Field(strict=False)] | None = None
    """A plain .safetensors file with the parameters to start from (relative to this file)."""
    select: Select = Select()
    optimizer: Optimizer | None = None
    groups: Annotated[dict[GroupName, Group], Field(strict=False)] = Field(default={})
    """Several groups of parameters by name, in place of select and optimizer; all take one step together."""
    schedule: Schedule = Schedule()
    train: Train
    data: Data = Data()
    precision: Precision = Precision()
    topology: Topology = Topology()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    eval: Eval = Eval()

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterator[Broken]:
        """One way to say what is trained."""
        groups = given.get("groups")
        if not groups and "optimizer" not in given:
            yield Broken("optimizer", "required key is missing; or groups, for several of them")
        everything = Select().model_dump(mode="json")  # what a resolved config has there
        for key in ("select", "optimizer"):
            if groups and given.get(key) not in (None, Select(), everything):
                yield Broken(key, "given besides groups; write it in the groups that it is about")
        yield from _broken_replicas(groups, given.get("topology"))

    @property
    def parts(self) -> dict[str, Group]:
        """The groups by name; one that is written at the top level is called "default"."""
        if self.groups:
            return dict(self.groups)
        assert self.optimizer is not None  # by the rules
        return {"default": Group(select=self.select, optimizer=self.optimizer)}


def _broken_replicas(groups: Any, topology: Any) -> Iterator[Broken]:
    """Replica sets that the topology does not have."""
    topology = topology.model_dump() if isinstance(topology, Topology) else topology or {}
    if not isinstance(groups, Mapping) or not isinstance(topology, Mapping):
        return
    axes, world_size = topology.get("axes") or {}, topology.get("world_size", 1)
    if not isinstance(axes, Mapping) or type(world_size) is not int:
        return
    given = {name: _replicas(group) for name, group in groups.items()}
    for name, replicas in given.items():
        for text in replica_problems(replicas, axes, world_size):
            yield Broken(("groups", name, "replicas"), text)
        whole, _, part = str(name).rpartition("-")
        if part.isdigit() and given.get(whole, WORLD) != WORLD:
            told = f"the name of a part of groups.{whole}, as checkpoints have it; name the group otherwise"
            yield Broken(("groups", name), told)


def _replicas(group: Any) -> Any:
    """Of a group as it was written."""
    if isinstance(group, Group):
        return group.replicas
    return group.get("replicas", WORLD) if isinstance(group, Mapping) else WORLD


# Nothing under these keys changes what is trained.
_NO_MEANING = {
    "run.name", "run.dir", "log", "checkpoint", "eval",
    "topology.timeout_s", "topology.init_timeout_s", "topology.save_timeout_s", "topology.allow_non_loopback",
    "topology.max_restarts", "topology.shared_memory", "train.check_replicas_every", "train.stream_gradients",
    "data.workers", "data.prefetch",
}  # fmt: skip

# Keys that came after the first release, with what earlier runs, whose checkpoints do not know them, were trained with.
ADDED = {"precision.matmul": "highest", "train.accumulate": "local", "train.compile": False}


def meaning(config: Config) -> dict[str, Any]:
    """What changes results, as a flat dict of dotted keys and JSON values; two runs mean the same if it is equal.

    Files count by name, because a run may move to another folder. The length of a run counts only where the schedule
    is stretched over it: a run at a constant rate may simply be made longer.
    """
    document = config.model_dump(mode="json")
    document["recipe"] = Path(config.recipe).name if config.recipe.endswith(".py") else config.recipe
    document["init_from"] = config.init_from and config.init_from.name
    schedules = [part.schedule or config.schedule for part in config.parts.values()]
    if all(one.name == "constant" or one.total_steps is not None for one in schedules):
        for key in SPANS:
            del document["train"][key]
    return dict(_flat(document, ""))


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name in _NO_MEANING:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
