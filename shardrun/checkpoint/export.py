"""A checkpoint's model in the forms that others read: a plain safetensors file, or a folder for transformers.

Neither needs torch. Every file of the checkpoint that is read is held against its hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shardrun.checkpoint.assemble import open_header
from shardrun.checkpoint.byte_copies import Copier
from shardrun.checkpoint.manifest import canonical_json, read_manifest, understood
from shardrun.checkpoint.new_folder import new_folder
from shardrun.checkpoint.safe_files import open_inside
from shardrun.checkpoint.store import MODEL_FILE, tree_problems
from shardrun.errors import CheckpointError, UsageError
from shardrun.records.durable import write_file
from shardrun.records.header import TensorBytes, stored_tensors, write_safetensors

INDEX_FILE = f"{MODEL_FILE}.index.json"
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
    with understood(source), new_folder(target, needed) as staging:
        yield Copier(source, staging)


def export_safetensors(source: Path, target: Path) -> Exported:
    """The model under its own names, tied tensors once: the checkpoint's own file or files, and an index of several."""
    manifest = sound_manifest(source)
    with exported_folder(source, manifest, target) as copier:
        entries = model_entries(source, manifest)
        for entry in entries:
            copier.copy_file(entry)
        if len(entries) > 1:
            names = {name: one["path"] for one in entries for name in open_header(source, one["path"]).tensors}
            index = {"metadata": {"total_size": sum(one["bytes"] for one in entries)}, "weight_map": names}
            write_file(copier.staging / INDEX_FILE, canonical_json(index) + b"\n")
    return exported(target, manifest)


def exported(target: Path, manifest: Mapping[str, Any], *notes: str) -> Exported:
    """What stands in the folder `target` now."""
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    return Exported(target, manifest["step"], tuple(sizes), sum(sizes.values()), notes)


def model_entries(source: Path, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of the model's files in the manifest, several where ranks have parts of their own."""
    found = [dict(entry) for entry in manifest["files"] if entry["role"] == "model"]
    if not found or any("/" in entry["path"] for entry in found):
        raise CheckpointError(f"{source}: the manifest lists no file of the model, or one that is in another folder")
    return found


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
        entries = model_entries(source, manifest)
        write_file(copier.staging / "config.json", canonical_json(_with_dtype(config, manifest)) + b"\n")
        if manifest["aliases"] or len(entries) > 1:
            for entry in entries:
                copier.check_file(entry)
            _write_all_names(copier, entries, manifest["aliases"])
        else:
            copier.copy_file(entries[0])
        note = _opened(copier.staging, config)
    return exported(target, manifest, *note)


def _with_dtype(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Without a dtype transformers may open a model in another one than it was trained in."""
    floating = {dtype for dtype, _ in manifest["model"].values() if "float" in dtype}
    given = config.get("dtype") or config.get("torch_dtype")
    return dict(config) if given or len(floating) != 1 else {**config, "dtype": floating.pop()}


def _write_all_names(copier: Copier, entries: Sequence[Mapping[str, Any]], aliases: Mapping[str, str]) -> None:
    """All of the model in one file."""
    with ExitStack() as opened:
        tensors: dict[str, TensorBytes] = {}
        for path in (entry["path"] for entry in entries):
            file = opened.enter_context(open_inside(copier.checkpoint, path))
            tensors |= stored_tensors(file, str(copier.checkpoint / path))
        tensors |= {alias: tensors[name] for alias, name in aliases.items()}
        write_safetensors(copier.staging / MODEL_FILE, tensors, {"format": "pt"})


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
