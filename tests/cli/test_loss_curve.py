"""The picture at the end of a run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.support.training import document, trained


def test_a_run_leaves_its_loss_curve(tmp_path: Path) -> None:
    config = document(tmp_path, 2, {"train": {"steps": 4}, "eval": {"at_end": True}}, samples=[[1.0]] * 8)
    trained(config, stop_at=2)
    trained(config)
    root = ElementTree.parse(tmp_path / "loss.svg").getroot()
    (line,) = [p for p in root.iter("{http://www.w3.org/2000/svg}polyline") if p.get("class") == "smooth"]
    assert len(line.attrib["points"].split()) == 4


def test_a_picture_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "loss.svg").mkdir()
    done = trained(document(tmp_path, 1, {"train": {"steps": 2}}, samples=[[1.0]] * 2))
    (warning,) = done.texts("warning")
    assert "loss.svg" in warning
    assert "the loss curve is not drawn" in warning
    assert done.checkpoint(2).is_dir()
    assert not (tmp_path / "loss.svg.part").exists()
