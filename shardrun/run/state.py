"""Between a live run and its checkpoints: what a save holds, and how a restore replaces everything with it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardrun.checkpoint.commit import Snapshot
from shardrun.checkpoint.load import Loaded, load
from shardrun.checkpoint.manifest import read_manifest, understood
from shardrun.checkpoint.regroup import Held, load_regrouped
from shardrun.checkpoint.reshard import CLAIM, RESHARDED
from shardrun.checkpoint.snapshot import ModelParts, model_specs
from shardrun.checkpoint.store import candidates
from shardrun.comm.communicator import Communicator
from shardrun.config.schema import meaning
from shardrun.data.seeding import Purpose, derive_seed, restore_rng, rng_for_device, rng_misfits, rng_states, seed_all
from shardrun.errors import CheckpointError, ContractError, DivergenceError, by_all
from shardrun.records.fit import group_violations
from shardrun.records.record import ShardRecord
from shardrun.records.tensors import host_copy
from shardrun.run.build import Built
from shardrun.run.changes import changes, of_world_size, optimizer_misfits, recipe_changes, refusal
from shardrun.run.groups import members
from shardrun.run.model import buffer_forms, distinct_parameters, named_buffers, named_tensors, tied_names
from shardrun.run.model_files import model_parts, parameter_misfits, shared_parts
from shardrun.run.optimizer import Placement, state_keys
from shardrun.run.progress import Progress
from shardrun.run.replicas import digests_of, joint_digest
from shardrun.run.resharding import Source

_BUFFER = "buffer/"


@dataclass
class Lineage:
    """Which run this is, which start of it, and the checkpoint it stands on."""

    run: str
    attempt: str
    parent: Path | None
    fence: int | None


def snapshot_of(
    built: Built, progress: Progress, lineage: Lineage, compared: Mapping[str, str] | None = None
) -> Snapshot:
    """Everything that the next step depends on, to be saved before anything goes on; collective.

    `compared`: digests of the parameters that the ranks have just compared, if they have. They are what the checkpoint
    says of its parameters: what changes before it is written is found at the load.
    """
    built.comm.agree("buffers to save", error=_grown_buffers(built))
    now = _without_record(built, progress, lineage)
    names = [*distinct_parameters(built.model)]
    return replace(now, records=_records(built), param_sha256=partial(_joint_digest, names, compared or {}))


def snapshot_aside(
    built: Built, progress: Progress, lineage: Lineage, compared: Mapping[str, str]
) -> Callable[[], Snapshot]:
    """The same in memory of its own on the host, as far as this rank writes it, in two parts; collective.

    What forward may change, buffers and random streams, is copied before this returns. What it returns copies the rest,
    on any thread, and is called once, before the next update; local. `compared`: digests of the parameters as they are
    now; whoever writes one finds out if it was not copied as it was.
    """
    grown = _grown_buffers(built)
    now, parameters = _without_record(built, progress, lineage), distinct_parameters(built.model)
    proven = partial(_proven_digest, progress.step, [*parameters], compared)
    own = {name: host_copy(tensor) for name, tensor in now.rank_state.items()}
    buffers = {name: host_copy(tensor) for name, tensor in now.model.items() if name not in parameters}

    def take() -> Snapshot:
        if grown is not None:
            raise grown
        written = now.written(built.comm.rank)  # of the rest only its form is asked for
        copied = {name: buffers[name] if name in buffers else host_copy(one) for name, one in written.items()}
        records = _records(built)
        for record in records.values():
            record.tensors = {name: host_copy(tensor) for name, tensor in record.tensors.items()}
        return replace(now, model={**now.model, **copied}, records=records, rank_state=own, param_sha256=proven)

    return take


def _without_record(built: Built, progress: Progress, lineage: Lineage) -> Snapshot:
    aliases = tied_names(built.model)
    model = {name: tensor for name, tensor in named_tensors(built.model).items() if name not in aliases}
    return Snapshot(
        step=progress.step,
        manifest=_sections(built, progress, lineage),
        model=model,
        aliases=aliases,
        rank_state=rank_state(built.model),
        parts=_parts(built, model, aliases),
    )


def _parts(built: Built, model: Mapping[str, Tensor], aliases: Mapping[str, str]) -> ModelParts | None:
    if built.in_parts:
        return model_parts(built.comm, model, aliases)
    if built.config.checkpoint.split_model:
        return shared_parts(built.comm, model, aliases, distinct_parameters(built.model))
    return None


def _records(built: Built) -> dict[str, ShardRecord]:
    return {group.record_name: group.sharded.live_record() for group in built.groups}


def rank_state(model: nn.Module) -> dict[str, Tensor]:
    """What a rank keeps in a file of its own: random streams and buffers."""
    return {**rng_states(), **{_BUFFER + name: buffer for name, buffer in named_buffers(model).items()}}


def _joint_digest(names: list[str], compared: Mapping[str, str], model: Mapping[str, Tensor]) -> str:
    """sha256 (hex) over the digests of the parameters in `model` by name, tied ones once."""
    held = [name for name in names if name in model]
    return joint_digest(
        {name: compared[name] for name in held} if compared else digests_of({n: model[n] for n in held})
    )


def _proven_digest(step: int, names: list[str], compared: Mapping[str, str], model: Mapping[str, Tensor]) -> str:
    """The same, of copies: DivergenceError unless each is what was compared."""
    digests = digests_of({name: model[name] for name in names if name in model})
    changed = [name for name, one in digests.items() if one != compared[name]]
    if changed:
        raise DivergenceError(
            f"step {step} is not saved, because {changed[0]} ({len(changed)} of {len(digests)} parameters in all) has "
            "changed since it was compared; look for faulty memory, and for a recipe that writes to its parameters"
        )
    return joint_digest(digests)


def _grown_buffers(built: Built) -> CheckpointError | None:
    """A buffer that came or changed its form in forward could not be put back into a model that was just built."""
    before, now = built.buffer_forms, buffer_forms(built.model)
    changed = [
        f"{path}: {before.get(path, 'not there')} at set-up, {now.get(path, 'not there')} now"
        for path in sorted(before.keys() | now.keys())
        if before.get(path) != now.get(path)
    ]
    if not changed:
        return None
    told = "buffers changed their form since set-up, so that no resume could put them back; give them their full size "
    return CheckpointError(f"{told}in __init__, or keep them out of buffers: " + "; ".join(changed))


def _sections(built: Built, progress: Progress, lineage: Lineage) -> dict[str, Any]:
    config = built.config
    return {
        "run": lineage.run,
        "attempt": lineage.attempt,
        "parent": None if lineage.parent is None else lineage.parent.name,
        "counters": progress.to_json(),
        "topology": {"members": members(built.config)},
        **_spread_groups(built),
        "schedule": {**config.schedule.model_dump(mode="json"), "position": progress.updates},
        "data": {"identity": built.loader.identity, "samples": built.loader.samples, "position": progress.position},
        "recipe": {"source": Path(built.recipe.source).name, "sha256": built.recipe.sha256},
        "numerics": numerics(built),
        "config": config.model_dump(mode="json"),
        "meaning": meaning(config),
        **({} if built.recipe.hf_config is None else {"hf_config": built.recipe.hf_config}),
    }


def _spread_groups(built: Built) -> dict[str, Any]:
    """The sections of the groups that are not on all ranks, as far as their record does not tell."""
    members = {group.record_name: list(group.comm.ranks) for group in built.groups if group.spread}
    return {"groups": {name: {"members": ranks} for name, ranks in members.items()}} if members else {}


def numerics(built: Built) -> dict[str, Any]:
    """What the bits depend on besides the config."""
    device = built.comm.device
    processor = {"cpu": torch.backends.cpu.get_cpu_capability()}  # chooses among kernels of other vector lengths
    if device.type == "cuda":
        processor["cuda"] = torch.cuda.get_device_name(device)
        processor["cuda capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "torch": str(torch.__version__),
        "device": device.type,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "seam": built.comm.seam,
    }


def saved_order(comm: Communicator, source: Source) -> dict[str, Placement]:
    """How the checkpoint that `resume` will take up has placed the parameters of each record; collective.

    Empty where there is none, or where it cannot be read: `resume` says why.
    """
    found: dict[str, Any] = {}
    if comm.rank == 0 and not source.regroup:
        with suppress(CheckpointError, OSError, LookupError, TypeError, AttributeError, ValueError, StopIteration):
            manifest, _ = read_manifest(next(one.path for one in candidates(source.path) if one.complete))
            found = {name: asdict(Placement.of(group)) for name, group in manifest["groups"].items()}
    shared = comm.agree("saved placement", found)[0]
    return {name: Placement(**placement) for name, placement in shared.items()}


def resume(built: Built, job: Mapping[str, Any], source: Source) -> tuple[Progress, Lineage]:
    """Take up the newest checkpoint of `source`; a new Progress if there is none and none was named. Collective.

    On all ranks: CheckpointError if one that was named is gone; UsageError if it was trained with another config or
    recipe, unless the job accepts changes.
    """
    options = job["options"]
    accepts = bool(options.get("accept_changes"))
    if source.regroup:
        loaded: Loaded | None = _regrouped(built, source, accepts)
    else:
        expected = _expected(built)
        if accepts:
            del expected["numerics"]  # a resume elsewhere is asked for: exact state, other bits from here on
        names = named_tensors(built.model).keys() if built.in_parts else None
        how = {"allow_fallback": bool(options.get("allow_fallback")), "required": bool(options.get("resume_from"))}
        loaded = load(source.path, built.comm, expected, names=names, digests=digests_of, **how)
    if loaded is None:
        run = built.comm.agree("run id", new_run_id())[0]
        return Progress(), Lineage(run, _attempt(built), None, options.get("fence"))
    _judge_changes(built, loaded, source, accepts)
    progress = restore(built, loaded, other_device=accepts)
    built.notes.extend([*source.notes, *loaded.notes])
    if RESHARDED in loaded.manifest and not source.regroup:
        ranks = f"{loaded.manifest[RESHARDED]['world_size']} to {built.comm.world_size} ranks"
        built.notes.append(f"{(source.made_of or loaded.path).name} was resharded from {ranks}; {CLAIM}")
    run = str(loaded.manifest["run"])
    return progress, Lineage(run, _attempt(built), source.made_of or loaded.path, options.get("fence"))


def _regrouped(built: Built, source: Source, accepts: bool) -> Loaded:
    """What this rank's groups hold of a checkpoint of other replica sets; collective."""
    metas = {group.record_name: group.sharded.record_meta() for group in built.groups}
    now = {} if accepts else numerics(built)
    now.pop("seam", None)  # follows from the world
    names, buffers = named_tensors(built.model).keys(), named_buffers(built.model)
    held = Held(names, tied_names(built.model), [_BUFFER + name for name in buffers])
    return load_regrouped(source.path, built.comm, metas, held, now)


def _judge_changes(built: Built, loaded: Loaded, source: Source, accepts: bool) -> None:
    """Refuse what means something else than what was saved, or fit the record to what is accepted; collective."""
    manifest = loaded.manifest
    recipe: list[str] = []

    def changed() -> list[str]:
        recipe.extend(recipe_changes(manifest, built.recipe.source, built.recipe.sha256))
        lines = changes(manifest, built.config)
        return [*(line for line in lines if not (source.regroup and of_world_size(line))), *recipe]

    lines = _of_any_rank(built, loaded, "changes", changed)
    if lines and not accepts:
        raise by_all(refusal(source.made_of or source.path, lines))
    metas = {group.record_name: group.sharded.record_meta() for group in built.groups}

    def misfits() -> list[str]:
        found = []
        for group in built.groups:
            saved, meta = manifest["groups"][group.record_name], metas[group.record_name]
            lines = []
            if accepts:
                lines = optimizer_misfits(saved["optimizer"], meta["optimizer"], partial(state_keys, group.sharded))
                saved = {**saved, "optimizer": meta["optimizer"]}
            found += lines or group_violations(saved, {key: meta[key] for key in ("optimizer", "layout")})
        return found

    if lines := _of_any_rank(built, loaded, "changed optimizer", misfits):
        raise by_all(CheckpointError(f"checkpoint {loaded.path} does not fit this run: " + "\n  ".join(lines)))
    if accepts:
        built.notes.extend(recipe)
        for name, meta in metas.items():
            loaded.records[name].meta.update({key: meta[key] for key in ("numerics", "optimizer")})


def _of_any_rank(built: Built, loaded: Loaded, tag: str, look: Callable[[], list[str]]) -> list[str]:
    """Each line once that `look` gives on any rank; CheckpointError on all if a manifest cannot be looked at."""
    lines, error = [], None
    try:
        with understood(loaded.path):
            lines = look()
    except CheckpointError as malformed:
        error = malformed
    return list(dict.fromkeys(line for rank in built.comm.agree(tag, lines, error) for line in rank))


def new_run_id() -> str:
    """A name for a run that is begun."""
    return secrets.token_hex(8)


def _attempt(built: Built) -> str:
    return str(built.comm.agree("attempt", f"{os.getpid()}-{secrets.token_hex(4)}")[0])


def _expected(built: Built) -> dict[str, Any]:
    aliases = tied_names(built.model)
    model = {name: tensor for name, tensor in named_tensors(built.model).items() if name not in aliases}
    specs: Mapping[str, Any] = model_specs(model)
    groups = {g.record_name: {"contract": g.sharded.record_meta()["contract"]} for g in built.groups}
    if built.in_parts:
        parts = model_parts(built.comm, model, aliases)
        specs, aliases = parts.specs, dict(parts.aliases)
        groups = {name: group for held in built.comm.agree("groups", groups) for name, group in held.items()}
    return {
        "topology": {"world_size": built.comm.world_size, "members": members(built.config)},
        # Of what the config says, changes are told as such once they are known: `_judge_changes`.
        "groups": groups,
        "model": specs,
        "aliases": aliases,
        "numerics": numerics(built),
    }


def restore(built: Built, loaded: Loaded, *, other_device: bool = False) -> Progress:
    """Replace all live state by what was loaded. Refusals of all ranks come first; then nothing can fail.

    `other_device`: what was saved on a CPU may go on on a GPU, and the other way round. A resharded checkpoint holds no
    random streams: those of this rank begin anew.
    """
    progress, misfits = None, []
    try:
        progress = Progress.from_json(loaded.manifest["counters"])
    except (CheckpointError, KeyError) as error:
        misfits.append(str(error))
    buffers = named_buffers(built.model)
    streams, notes = rng_for_device(loaded.rank_state) if other_device else (loaded.rank_state, [])
    anew = RESHARDED in loaded.manifest
    misfits += _data_misfits(built, loaded.manifest.get("data", {}))
    misfits += _buffer_misfits(buffers, loaded.rank_state)
    misfits += [] if anew else [f"random stream {line}" for line in rng_misfits(streams)]
    misfits += [*parameter_misfits(built, loaded), *_record_misfits(built, loaded)]
    told = f"checkpoint {loaded.path.name} does not fit: " + "; ".join(misfits)
    built.comm.agree("restore", error=CheckpointError(told) if misfits else None)
    assert progress is not None  # or its misfit was raised above
    for group in built.groups:
        group.sharded.load_record(loaded.records[group.record_name])
    targets = named_tensors(built.model)
    for name, target in targets.items():
        target.copy_(loaded.model[name])
    for name, buffer in buffers.items():
        buffer.copy_(loaded.rank_state[_BUFFER + name])
    if anew:
        seed_all(derive_seed(Purpose.RESHARD, built.config.run.seed, progress.step, built.comm.rank))
    else:
        restore_rng(streams)
        built.notes.extend(notes)
    return progress


def _record_misfits(built: Built, loaded: Loaded) -> list[str]:
    """What keeps the sessions of this rank from taking their records; collective."""
    found = []
    for group in built.groups:
        try:
            group.sharded.require_fit(loaded.records[group.record_name])
        except ContractError as error:
            found.append(str(error))
    return found


def _data_misfits(built: Built, saved: Mapping[str, Any]) -> list[str]:
    now = {"identity": built.loader.identity, "samples": built.loader.samples}
    return [
        f"data {key} saved {saved.get(key)}, this run {value}" for key, value in now.items() if saved.get(key) != value
    ]


def _buffer_misfits(buffers: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    held = {name.removeprefix(_BUFFER): tensor for name, tensor in saved.items() if name.startswith(_BUFFER)}
    found = [
        f"buffer {name} is in the checkpoint or in the model only" for name in sorted(held.keys() ^ buffers.keys())
    ]
    for name in sorted(held.keys() & buffers.keys()):
        old, new = held[name], buffers[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            found.append(
                f"buffer {name}: saved {tuple(old.shape)} {old.dtype}, this run {tuple(new.shape)} {new.dtype}"
            )
    return found
