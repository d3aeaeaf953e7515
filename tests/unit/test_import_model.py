"""Models of others become one plain file; what is not whole or not plain is refused with the way out."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from shardrun.checkpoint.export import INDEX_FILE
from shardrun.checkpoint.import_model import import_model
from shardrun.cli.app import app
from shardrun.errors import CheckpointError, UsageError
from shardrun.records import durable
from tests.golden.runs import put

MODEL = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.arange(4.0).to(torch.bfloat16),
    "c": torch.tensor(7),
}


def in_parts(folder: Path) -> Path:
    folder.mkdir()
    parts = {"model-00001-of-00002.safetensors": ["a.weight"], "model-00002-of-00002.safetensors": ["b.weight", "c"]}
    for file, names in parts.items():
        save_file({name: MODEL[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def as_file(path: Path) -> Path:
    save_file(MODEL, path)
    return path


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == MODEL.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in MODEL.items()
    )


def test_a_file_a_folder_and_parts_give_the_same_file(tmp_path: Path) -> None:
    sources = [as_file(tmp_path / "some.safetensors"), in_parts(tmp_path / "parts"), tmp_path / "whole"]
    sources[2].mkdir()
    (sources[2] / "model.safetensors").symlink_to(sources[0])  # as in a cache of downloads
    made = []
    for number, source in enumerate(sources):
        target = tmp_path / f"{number}.safetensors"
        done = CliRunner().invoke(app, ["import", str(source), "-o", str(target)])
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith(
            f"{target}: 3 tensors, {target.stat().st_size} bytes; start from it with init_from"
        )
        made.append(target.read_bytes())
        assert same(load_file(target))
    assert made[0] == made[1] == made[2]


def _absent(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _cut(folder: Path) -> None:
    os.truncate(folder / "model-00001-of-00002.safetensors", 90)


def _index(**more: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = json.loads((folder / INDEX_FILE).read_text())
        found["weight_map"] |= more
        (folder / INDEX_FILE).write_text(json.dumps(found))

    return change


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_absent, "model-00002-of-00002.safetensors: cannot be opened: No such file"),
        (_cut, "model-00001-of-00002.safetensors: "),
        (
            _index(**{"d.weight": "model-00002-of-00002.safetensors"}),
            r"d.weight \(1 in all\) is in the index and not in",
        ),
        (
            _index(**{"a.weight": "../other.safetensors"}),
            "weight_map does not give the name of a file for every tensor",
        ),
        (_index(**{"a.weight": 3}), "weight_map does not give the name of a file for every tensor"),
        (lambda folder: (folder / INDEX_FILE).write_text("[" * 100_000), "is no index of a model"),
        (
            lambda folder: save_file(MODEL, folder / "model-00001-of-00002.safetensors"),
            "which another file of .* holds",
        ),
    ],
)
def test_parts_that_make_no_whole_model_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = in_parts(tmp_path / "parts")
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        import_model(folder, tmp_path / "out.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_pickle_is_never_read_and_the_way_out_is_told(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    torch.save(MODEL, tmp_path / "model.pt")
    for source, words in (
        (tmp_path / "dcp", "is a torch DCP checkpoint, whose .metadata is pickle, .* with dcp_to_torch_save"),
        (tmp_path / "model.pt", r"pickle \(.pt, .bin\) is never read here: .* save it with safetensors"),
        (put(tmp_path / "run"), "is a checkpoint of shardrun; use `shardrun export`"),
        (tmp_path / "nowhere", "is neither a .safetensors file nor a folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            import_model(source, tmp_path / "out.safetensors")


def test_the_new_file_is_whole_or_not_there(tmp_path: Path) -> None:
    source = as_file(tmp_path / "some.safetensors")
    with pytest.raises(UsageError, match=r"some.safetensors: is there already"):
        import_model(source, source)
    with pytest.raises(UsageError, match="give the new file such a name"):
        import_model(source, tmp_path / "out.pt")

    def fail(call: str, path: Path) -> None:
        if call == "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    durable.on_io = fail
    try:
        with pytest.raises(CheckpointError, match=r"out.safetensors: cannot be written: No space left"):
            import_model(source, tmp_path / "out.safetensors")
    finally:
        durable.on_io = durable._silent
    assert [path.name for path in tmp_path.iterdir()] == ["some.safetensors"]
