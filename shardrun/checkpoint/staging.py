"""Steps 2 to 4 of a save: a folder that every rank can see, every rank's files in it, and what all outcomes say."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardrun.checkpoint.lock import read_owner
from shardrun.checkpoint.manifest import is_plain_name, joined_digest
from shardrun.checkpoint.plan import PARAM_SHA256, Plan, PlannedFile
from shardrun.checkpoint.retention import clear_leftovers
from shardrun.checkpoint.safe_files import open_inside
from shardrun.checkpoint.store import CHECKPOINTS, STAGING, step_name
from shardrun.errors import CheckpointError
from shardrun.records.durable import make_folder, remove_tree, sync_folder, write_file
from shardrun.records.fit import cover_violations, holds_whole
from shardrun.records.header import write_safetensors

if TYPE_CHECKING:
    from shardrun.comm.communicator import Communicator

NONCE = "nonce"


def open_staging(run_dir: Path, plan: Plan, fence: int | None) -> dict[str, str]:
    """Clear left-overs, check the room, make the folder with a nonce in it; its name and the nonce. Rank 0 does it."""
    require_ownership(run_dir, fence)
    folder = run_dir / CHECKPOINTS
    nonce = secrets.token_hex(16)
    attempt = str(plan.sections.get("attempt", ""))
    name = f"{step_name(plan.step)}.{attempt if is_plain_name(attempt) else 'unnamed'}.{nonce[:8]}"
    try:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        make_folder(folder, exist_ok=True)
        for path in new:
            sync_folder(path.parent)
        clear_leftovers(folder)
        if plan.needed > shutil.disk_usage(folder).free:
            raise CheckpointError(cannot_save(folder, plan.needed, "there is not enough room"))
        make_folder(folder / STAGING / name, exist_ok=True)
        write_file(folder / STAGING / name / NONCE, nonce.encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            remove_tree(folder / STAGING / name)
        raise CheckpointError(cannot_save(folder, plan.needed, error)) from error
    return {"name": name, "nonce": nonce}


def staging_folder(run_dir: Path, opened: dict[str, str]) -> Path:
    """Where rank 0 has opened what `open_staging` told."""
    return run_dir / CHECKPOINTS / STAGING / opened["name"]


def read_nonce(staging: Path, opened: dict[str, str]) -> None:
    """Return if this rank finds the nonce that rank 0 wrote; CheckpointError otherwise."""
    try:
        with open_inside(staging, NONCE) as file:
            found = file.read(100).decode("ascii", "replace")
    except CheckpointError as error:
        found = str(error)
    if found != opened["nonce"]:
        raise CheckpointError(
            f"{staging}: the nonce that rank 0 wrote there is not to be found ({found}); "
            f"{staging.parents[2]} has to be one folder that all ranks share"
        )


@contextlib.contextmanager
def abandoned_on_error(staging: Path, comm: Communicator) -> Iterator[None]:
    """Remove staging when an agreement inside has raised: no rank writes any more. After a lost peer it is left."""
    try:
        yield
    except Exception:
        if comm.rank == 0 and not comm.is_poisoned:
            with contextlib.suppress(OSError):
                remove_tree(staging)
        raise


def require_ownership(run_dir: Path, fence: int | None) -> None:
    """[Note: fencing] A run that stood still for long may find that its folder has a new owner: it touches nothing."""
    owner = read_owner(run_dir)
    if fence is not None and (owner is None or owner.token != fence):
        who = "nobody" if owner is None else f"pid {owner.pid} on {owner.host}"
        raise CheckpointError(f"{run_dir}: is owned by {who} now, not by this run; nothing was published")


def cannot_save(folder: Path, needed: int, why: OSError | str) -> str:
    """The message for a save that the disk does not take."""
    cause = why if isinstance(why, str) else f"{why.strerror} ({why.filename or 'while writing'})"
    try:
        free = f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError:
        free = "how many are free there is not known"
    return f"{folder}: cannot save: {cause}; this checkpoint needs {needed:,} bytes, {free}"


def write_files(staging: Path, plan: Plan) -> dict[str, Any]:
    """Write this rank's files, hashed and fsynced; what the others have to know of them, as plain JSON. Local."""
    try:
        with ThreadPoolExecutor(1) as beside:
            hashed = None if plan.param_sha256 is None else beside.submit(plan.param_sha256)
            entries = [_write_one(staging, file) for file in plan.files]
            digest = None if hashed is None else hashed.result()
        # Whoever wrote a file makes its name durable, so that the rename is the last thing that has to happen.
        written = {staging / folder for file in plan.files for folder in Path(file.path).parents}
        for folder in sorted(written, reverse=True):
            sync_folder(folder)
    except OSError as error:
        raise CheckpointError(cannot_save(staging.parent.parent, plan.needed, error)) from error
    return {"entries": entries, "split": plan.split, PARAM_SHA256: digest}


def joined_entries(plan: Plan, written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The manifest lines of all files, from what `write_files` gave on every rank; CheckpointError if some misfit."""
    entries = [entry for one in written for entry in one["entries"]]
    found = _twice(entries) + _uncovered(plan, entries) + _unlike([one["split"] for one in written])
    if found:
        raise CheckpointError(f"step {plan.step} is not saved, its records are not whole: " + "; ".join(found))
    return entries


def joined_sections(plan: Plan, written: list[dict[str, Any]]) -> dict[str, Any]:
    """The sections of the manifest, with what only the writing could tell."""
    digests = [one[PARAM_SHA256] for one in written if one[PARAM_SHA256] is not None]
    return {**plan.sections, **({PARAM_SHA256: joined_digest(digests)} if digests else {})}


def _write_one(staging: Path, file: PlannedFile) -> dict[str, Any]:
    path = staging / file.path
    make_folder(path.parent, exist_ok=True)
    digest = write_safetensors(path, file.tensors, file.metadata)
    return {**file.entry, "path": file.path, "bytes": digest.bytes, "hash": digest.hash}


def _twice(entries: list[dict[str, Any]]) -> list[str]:
    paths = [entry["path"] for entry in entries]
    return [f"{path} is written by two ranks" for path in sorted(set(paths)) if paths.count(path) > 1]


def _uncovered(plan: Plan, entries: list[dict[str, Any]]) -> list[str]:
    """Fragments that leave elements out, or hold some twice: found here rather than at the resume."""
    found = []
    for group, section in plan.sections["groups"].items():
        held = {e["rank"]: e["fragments"] for e in entries if e["role"] == "record" and e["group"] == group}
        lines = cover_violations(section["contract"], held, whole=holds_whole(section))
        found += [f"group {group}: {line}" for line in lines]
    return found


def _unlike(split: list[dict[str, dict[str, dict[str, str]]]]) -> list[str]:
    """Cut parameters whose holders do not have the same state keys, or not the same value of a scalar."""
    holders: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
    for rank, groups in enumerate(split):
        for group, paths in groups.items():
            for path, held in paths.items():
                holders.setdefault((group, path), {})[rank] = held
    return [
        f"group {group}: the ranks hold unlike state of {path}: {by_rank}"
        for (group, path), by_rank in holders.items()
        if any(held != next(iter(by_rank.values())) for held in by_rank.values())
    ]
