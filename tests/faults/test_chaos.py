"""A few cycles of `make chaos`, and that it would find what is wrong."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardrun.checkpoint.manifest import MANIFEST, read_manifest, seal
from shardrun.checkpoint.store import MODEL_FILE, newest
from shardrun.run.metrics import NAME
from tests.faults.chaos import HEADER, VARIANTS, Chaos, Report, differences
from tests.faults.conftest import Tell
from tests.faults.deeds import DEEDS, Deed, Moment

pytestmark = pytest.mark.sample(1)

CYCLES, SEED, STEPS = 3, 3, 12


@dataclass(frozen=True)
class Cut:
    """A folder with run-0, which was cut into pieces, and twin-0, which was not."""

    folder: Path
    report: Report


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """After a few cycles."""
    folder = tmp_path_factory.mktemp("chaos")
    return Cut(folder, Chaos(folder, SEED, STEPS).run(CYCLES, print))


@pytest.mark.timeout(400)
def test_a_run_that_was_cut_into_pieces_ends_as_its_twin(cut: Cut, tell: Tell) -> None:
    report = cut.report
    assert report.wrong == []
    assert sum(len(tally.seconds) for tally in report.tallies.values()) == CYCLES
    assert report.runs == list(VARIANTS)[: len(report.runs)]
    assert differences(cut.folder / "run-0", cut.folder / "twin-0") == []
    title = f"chaos: {CYCLES} cycles of seed {SEED}; a hundred in `make chaos`"
    for row in report.rows():
        tell(title, HEADER, row)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [("bit", [MODEL_FILE]), ("row", [NAME]), ("repeated", [NAME]), ("position", ["data"])],
)
def test_whatever_differs_is_found(cut: Cut, tmp_path: Path, damage: str, expected: list[str]) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(cut.folder / "run-0", run_dir)
    found = newest(run_dir)
    assert found is not None
    model, metrics = found.path / MODEL_FILE, run_dir / NAME
    lines = metrics.read_text().splitlines(keepends=True)
    if damage == "bit":
        content = bytearray(model.read_bytes())
        content[-1] ^= 1
        model.write_bytes(content)
    elif damage == "row":
        metrics.write_text("".join(lines[:-1]))
    elif damage == "repeated":
        metrics.write_text("".join([lines[0], *lines]))
    else:
        manifest, _ = read_manifest(found.path)
        del manifest["digest"]
        manifest["data"]["position"] += 1
        (found.path / MANIFEST).write_bytes(seal(manifest))
    assert differences(run_dir, cut.folder / "twin-0") == expected


def test_the_same_seed_is_the_same_chaos() -> None:
    def deeds(seed: int) -> list[Deed]:
        return [make(Moment(f"{seed} {kind}", 3)) for kind, (_, make) in DEEDS.items()]

    def words(seed: int) -> list[tuple[str, ...]]:
        return [deed.words for deed in deeds(seed)]

    assert words(1) == words(1) != words(2)
    assert all(0 in deed.codes for deed in deeds(1))
