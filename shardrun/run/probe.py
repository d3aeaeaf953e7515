"""What the live objects of a rank hold at one moment, written down for the parent of a verification to compare.

Everything is read from the objects that train (parameters, buffers, the torch.optim state, the streams of the process),
never from what a checkpoint would save: what a save forgets or a restore garbles shows here.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardrun.data.order import Window, micro_batches, rank_share, sample_indices
from shardrun.records.header import write_safetensors
from shardrun.records.tensors import host_bytes, tensor_bytes
from shardrun.run.build import Built
from shardrun.run.optimizer import Sharded, shares
from shardrun.run.progress import Progress

_COMING_WINDOWS = 2


def write_probe(folder: Path, moment: str, built: Built, progress: Progress, more: Mapping[str, Any]) -> None:
    """Write MOMENT.rank-N.safetensors and .json into `folder`. Local; reads only.

    Tensors are named "<what>/<name>", or "<what>/<path>@<start>" where they begin with element `start` of a flattened
    parameter. `sections` of the JSON are compared value by value, `more` is added to the document.
    """
    random_tensors, random_values = _random_streams(built.comm.device)
    tensors = {**_model_tensors(built.model), **_optimizer_tensors(built), **random_tensors}
    sections = {**_positions(built, progress), **random_values}
    document = {"step": progress.step, "sections": sections, "attributes": _attributes(built.model), **more}
    base = folder / f"{moment}.rank-{built.comm.rank}"
    write_safetensors(
        base.with_suffix(base.suffix + ".safetensors"),
        {name: tensor_bytes(name, tensor) for name, tensor in tensors.items()},
        {},
        fsync=False,
    )
    base.with_suffix(base.suffix + ".json").write_text(json.dumps(document, default=str))


# ---- tensors -------------------------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    found = {f"parameters/{path}": parameter.data for path, parameter in model.named_parameters(remove_duplicate=False)}
    # Those that a state_dict leaves out included: the next step depends on them as well.
    return found | {f"buffers/{path}": buffer for path, buffer in model.named_buffers(remove_duplicate=False)}


@dataclass(frozen=True)
class LiveLeaf:
    """A leaf of the live torch.optim objects: the elements of parameter `path` from `start` on."""

    path: str
    start: int
    tensor: Tensor
    is_master: bool
    """Whether it is an FP32 master."""
    state: dict[str, Any]
    """What its optimizer keeps for it, the live dict: tensors, and plain numbers."""

    @property
    def name(self) -> str:
        """As a probe names it."""
        return f"{self.path}@{self.start}"


def every_leaf(built: Built) -> Iterator[LiveLeaf]:
    """Each leaf that this rank steps, of all groups."""
    return (leaf for group in built.groups for leaf in live_leaves(group.sharded))


def live_leaves(sharded: Sharded) -> Iterator[LiveLeaf]:
    """Each leaf that this rank steps, in the order of the flat buffers."""
    groups = [(share.optimizer, group) for share in shares(sharded) for group in share.optimizer.param_groups]
    queues: list[Iterator[Tensor]] = [iter(group["params"]) for _, group in groups]
    for bucket in sharded.flat.buckets:
        own_storage = bucket.own.untyped_storage().data_ptr()
        optimizer = groups[bucket.option_group][0]
        for fragment in bucket.fragments:
            at = fragment.start
            while at < fragment.stop:
                leaf = next(queues[bucket.option_group])
                is_master = leaf.untyped_storage().data_ptr() != own_storage
                yield LiveLeaf(fragment.path, at, leaf.data, is_master, optimizer.state[leaf])
                at += leaf.numel()
            assert at == fragment.stop, f"{fragment.path}: its leaves end at {at}, the fragment at {fragment.stop}"


def _optimizer_tensors(built: Built) -> dict[str, Tensor]:
    found = {}
    for leaf in every_leaf(built):
        if leaf.is_master:
            found[f"fp32 masters/{leaf.name}"] = leaf.tensor
        for key, value in leaf.state.items():
            if isinstance(value, Tensor):
                found[f"optimizer {key}/{leaf.name}"] = value
    return found


def _optimizer_numbers(built: Built) -> dict[str, Any]:
    """Plain numbers that a recipe's own optimizer keeps in its state, by name."""
    return {
        f"{leaf.name}/{key}": _exact(value)
        for leaf in every_leaf(built)
        for key, value in leaf.state.items()
        if not isinstance(value, Tensor)
    }


def _random_streams(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The streams of this process, as tensors and as single values."""
    version, words, gauss = random.getstate()
    own = np.random.get_state(legacy=False)
    assert isinstance(own, dict)
    tensors = {"rng python/words": torch.tensor(words, dtype=torch.int64), "rng torch/cpu": torch.get_rng_state()}
    state = dict(own["state"])
    arrays = {key: state.pop(key) for key in list(state) if isinstance(state[key], np.ndarray)}
    tensors |= {f"rng numpy/{key}": torch.from_numpy(array.astype(np.int64)) for key, array in arrays.items()}
    if device.type == "cuda":
        tensors["rng cuda/device"] = torch.cuda.get_rng_state(device)
    numpy_values = {**{key: value for key, value in own.items() if key != "state"}, **state}
    values = {
        "rng python": {"version": version, "gauss": _exact(gauss)},
        "rng numpy": {key: _exact(value) for key, value in numpy_values.items()},
    }
    return tensors, values


def _exact(value: object) -> object:
    return float(value).hex() if isinstance(value, float) else str(value)


# ---- integers ------------------------------------------------------------------------------------------------------


def _positions(built: Built, progress: Progress) -> dict[str, Any]:
    counters = progress.to_json()
    updates, position = counters.pop("updates"), counters.pop("position")
    rates = [group.lr(updates + ahead) for group in built.groups for ahead in range(_COMING_WINDOWS)]
    optimizers = [share.optimizer for group in built.groups for share in shares(group.sharded)]
    every = [group for optimizer in optimizers for group in optimizer.param_groups]
    groups = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in every]
    numbers = _optimizer_numbers(built)
    return {
        "counters": {**counters, "optimizer_steps": _step_counts(built)},
        "schedule": {"position": updates, "next_lr": [_exact(rate) for rate in rates]},
        "data position": {"position": position, "next_windows": list(_coming(built, position))},
        "optimizer options": {str(number): group for number, group in enumerate(groups)},
        **({"optimizer numbers": numbers} if numbers else {}),
    }


def _step_counts(built: Built) -> int | dict[str, int]:
    """Of the only group, or by name."""
    counts = {group.name: group.sharded.step_count for group in built.groups}
    return counts if len(counts) > 1 else next(iter(counts.values()))


def _coming(built: Built, position: int) -> Iterator[dict[str, Any]]:
    """The next windows and which samples this rank would take from them."""
    micro, stop = built.config.train.micro_batch_size, built.stop_position
    for _ in range(_COMING_WINDOWS):
        if stop is not None and position >= stop:
            return
        window = built.loader.window(position, stop)
        share = rank_share(len(micro_batches(window, micro)), built.comm.rank, built.comm.world_size)
        samples = [index for number in share for index in micro_batch_samples(built, window, number)]
        yield {"epoch": window.epoch, "start": window.start, "stop": window.stop, "samples": samples}
        position = window.next_position


def micro_batch_samples(built: Built, window: Window, number: int) -> list[int]:
    """Indices into the data set that micro-batch `number` of `window` holds."""
    places = micro_batches(window, built.config.train.micro_batch_size)[number]
    indices = sample_indices(
        built.config.run.seed,
        window.epoch,
        built.loader.samples,
        places.start,
        places.stop,
        built.config.data.shuffle,
    )
    return [int(index) for index in indices]


# ---- what is not saved ---------------------------------------------------------------------------------------------


def _attributes(model: nn.Module) -> dict[str, str]:
    """Numbers, texts and tensors that modules keep as plain attributes, which no checkpoint holds: a hint, no proof."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training":
                continue
            name = f"{path}.{key}" if path else key
            if isinstance(value, bool | int | float | str):
                found[name] = repr(value)
            elif isinstance(value, Tensor):
                found[name] = f"tensor {content_digest(value, set())[:12]}"
    return found


def content_digest(value: Any, unread: set[str]) -> str:
    """sha256 (hex) over everything in a batch; the types of what cannot be read are added to `unread`."""
    digest = hashlib.sha256()
    for part in _parts(value, unread):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any, unread: set[str]) -> Iterator[bytes | memoryview]:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield host_bytes(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, item in value.items():
            yield from _parts(key, unread)
            yield from _parts(item, unread)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        yield f"sequence {len(value)}".encode()
        for item in items:
            yield from _parts(item, unread)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield f"{type(value).__name__} {value!r}".encode()
    else:
        unread.add(f"{type(value).__module__}.{type(value).__qualname__}")
