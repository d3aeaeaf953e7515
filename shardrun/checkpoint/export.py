"""A checkpoint's model in the forms that others read: a plain safetensors file, or a folder for transformers.

Neither needs torch. Every file of the checkpoint that is read is held against its hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import open_header
from shardrun.checkpoint.byte_copies import Copier
from shardrun.checkpoint.manifest import canonical_json, read_manifest
from shardrun.checkpoint.new_folder import new_folder
from shardrun.checkpoint.safe_files import open_inside
from shardrun.checkpoint.store import MODEL_FILE, tree_problems
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.durable import write_file
from shardrun.records.header import Entry, TensorBytes, read_tensor, write_safetensors

HF_CONFIG = "hf_config"
"""Section of a manifest: what the recipe's function of that name said."""


@dataclass(frozen=True)
class Exported:
    """A published, durable folder; `notes` are for the user's eyes."""

    path: Path
    step: int
    files: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...] = ()


def sound_manifest(source: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there with their sizes; CheckpointError otherwise."""
    manifest = read_manifest(source)[0]
    if problems := tree_problems(source, manifest):
        raise CheckpointError("\n  ".join([f"checkpoint {source} is damaged:", *problems]))
    return manifest


@contextmanager
def exported_folder(source: Path, manifest: Mapping[str, Any], target: Path) -> Iterator[Copier]:
    """`new_folder` with room for all of the checkpoint, and what copies into it."""
    needed = sum(entry["bytes"] for entry in manifest["files"])
    with new_folder(target, needed) as staging, ThreadPoolExecutor(1) as hasher:
        yield Copier(source, staging, hasher)


def export_safetensors(source: Path, target: Path) -> Exported:
    """The model under its own names, tied tensors once, as TARGET/model.safetensors: the checkpoint's own file."""
    manifest = sound_manifest(source)
    with exported_folder(source, manifest, target) as copier:
        copier.copy_file(model_entry(source, manifest))
    return exported(target, manifest)


def exported(target: Path, manifest: Mapping[str, Any], *notes: str) -> Exported:
    """What stands in the folder `target` now."""
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    return Exported(target, manifest["step"], tuple(sizes), sum(sizes.values()), notes)


def model_entry(source: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The line of the model's file in the manifest."""
    found = [entry for entry in manifest["files"] if entry["role"] == "model"]
    if [entry["path"] for entry in found] != [MODEL_FILE]:
        raise CheckpointError(f"{source}: the manifest lists {len(found)} files of the model, expected {MODEL_FILE}")
    return dict(found[0])


def export_hf(source: Path, target: Path) -> Exported:
    """A folder for `from_pretrained` of transformers: config.json, as the recipe's `hf_config` gave it when the
    checkpoint was saved, and model.safetensors, in which a tied tensor stands under each of its names.

    Where transformers is installed, it has to find every tensor of the model in the folder, and no other, before that
    is published. UsageError if the recipe had no `hf_config`; CheckpointError if transformers builds another model.
    """
    manifest = sound_manifest(source)
    config = manifest.get(HF_CONFIG)
    if not isinstance(config, dict):
        raise UsageError(
            f"{source}: its recipe named no Hugging Face config; give the recipe a function hf_config(args) that "
            "returns one as a dict, and save again, or export it as safetensors"
        )
    with exported_folder(source, manifest, target) as copier:
        entry = model_entry(source, manifest)
        write_file(copier.staging / "config.json", canonical_json(_with_dtype(config, manifest)) + b"\n")
        if manifest["aliases"]:
            copier.check_file(entry)
            _write_all_names(copier, manifest)
        else:
            copier.copy_file(entry)
        note = _opened(copier.staging, config)
    return exported(target, manifest, *note)


def _with_dtype(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Without a dtype transformers may open a model in another one than it was trained in."""
    floating = {dtype for dtype, _ in manifest["model"].values() if "float" in dtype}
    given = config.get("dtype") or config.get("torch_dtype")
    return dict(config) if given or len(floating) != 1 else {**config, "dtype": floating.pop()}


def _write_all_names(copier: Copier, manifest: Mapping[str, Any]) -> None:
    header = open_header(copier.checkpoint, MODEL_FILE)
    with open_inside(copier.checkpoint, MODEL_FILE) as file:

        def stored(entry: Entry) -> TensorBytes:
            return TensorBytes(entry.dtype, entry.shape, lambda: read_tensor(file, entry, MODEL_FILE))

        names = {name: name for name in header.tensors} | manifest["aliases"]
        tensors = {name: stored(header.tensors[kept]) for name, kept in names.items()}
        write_safetensors(copier.staging / MODEL_FILE, tensors, header.metadata)


def _opened(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """A note if transformers is not here to be asked; CheckpointError if it does not open the folder as it stands."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        return ["transformers is not installed here, so that nobody has tried to open the folder with it"]
    name = config["architectures"][0]
    architecture = getattr(transformers, name, None)
    if not (isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)):
        raise CheckpointError(f"hf_config: transformers {transformers.__version__} has no model {name!r}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    load: Any = architecture
    try:
        _, told = load.from_pretrained(
            folder, output_loading_info=True, local_files_only=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # transformers raises of all kinds
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{name} of transformers cannot be made of this hf_config: {why}") from error
    lines = []
    for kind in ("missing", "unexpected", "mismatched"):
        # What is mismatched comes as (name, shape in the file, shape in the model).
        found = sorted(key if isinstance(key, str) else str(key[0]) for key in told.get(f"{kind}_keys", ()))
        lines += [f"{len(found)} {kind}, {found[0]} among them"] if found else []
    if lines:
        raise CheckpointError(
            f"{name} of transformers is not the model of this checkpoint: of its tensors {'; '.join(lines)}; the "
            "names of the model have to be those of transformers, and the sizes those of hf_config"
        )
    return []
