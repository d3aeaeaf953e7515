"""The loss curve: what is drawn where, that it stays small, and that it is sound XML."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from shardrun.run.curve import draw, write_curve

SVG = "{http://www.w3.org/2000/svg}"


def drawn(folder: Path, rows: list[dict[str, Any]]) -> ElementTree.Element:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_curve(folder)
    assert path == folder / "loss.svg"
    assert [p.name for p in folder.iterdir() if p.suffix == ".part"] == []
    return ElementTree.parse(path).getroot()


def line(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    (found,) = [p for p in root.iter(f"{SVG}polyline") if p.get("class") == kind]
    pairs = [pair.split(",") for pair in found.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_without_a_loss_there_is_no_picture(tmp_path: Path) -> None:
    assert write_curve(tmp_path) is None
    rows = [{"step": 1, "loss": None}, {"step": 2, "loss": math.nan}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert write_curve(tmp_path) is None
    assert not (tmp_path / "loss.svg").exists()


def test_points_stand_where_their_step_and_loss_are(tmp_path: Path) -> None:
    root = drawn(tmp_path, [{"step": s, "loss": loss} for s, loss in ((1, 4.0), (3, 3.0), (5, 2.0))])
    (x1, y1), (x2, y2), (x3, y3) = line(root, "smooth")
    assert x1 < x2 < x3
    assert y1 < y2 < y3  # the y of a picture grows downwards
    assert x2 == pytest.approx((x1 + x3) / 2, abs=0.1)
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.1)
    assert {"step", "loss", "training", "4", "3", "2", f"Loss of {tmp_path.name}"} <= set(texts(root))
    assert "step 5 · training loss 4 to 2" in texts(root)


def test_validation_has_a_line_and_dots_of_its_own(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5.0 / s} for s in range(1, 31)]
    rows += [{"step": s, "val_loss": 6.0 / s} for s in (10, 20, 30)]
    root = drawn(tmp_path, rows)
    assert len(line(root, "val")) == 3
    assert [c.get("class") for c in root.iter(f"{SVG}circle")].count("dot") == 3 + 1  # one in the legend
    assert len(line(root, "raw")) == len(line(root, "smooth")) == 30
    assert {"training", "smoothed", "validation"} <= set(texts(root))


def test_the_smoothed_line_runs_through_the_middle_of_the_noise(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 3.0 + (0.5 if s % 2 else -0.5)} for s in range(1, 201)]
    root = drawn(tmp_path, rows)
    heights = [y for _, y in line(root, "raw")]
    middle, spread = (max(heights) + min(heights)) / 2, max(heights) - min(heights)
    assert all(abs(y - middle) < 0.2 * spread for _, y in line(root, "smooth")[10:-10])


def test_a_long_run_makes_no_big_file_and_no_spike_is_lost() -> None:
    train = [(float(s), 2.0 + math.sin(s)) for s in range(1, 200_001)]
    calm = [y for _, y in line(ElementTree.fromstring(draw("x", train, train)), "raw")]
    train[123_456] = (123_457.0, 9.0)
    text = draw("x", train, train)
    assert len(text) < 150_000
    heights = [y for _, y in line(ElementTree.fromstring(text), "raw")]
    assert min(heights) < min(calm) + 30
    assert sorted(heights)[1] > min(heights) + 100


def test_losses_of_many_sizes_get_a_logarithmic_axis() -> None:
    root = ElementTree.fromstring(draw("x", [(1.0, 1000.0), (2.0, 10.0), (3.0, 0.1)], []))
    (_, y1), (_, y2), (_, y3) = line(root, "smooth")
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.1)
    assert {"loss (logarithmic)", "0.1", "1", "10", "100", "1000"} <= set(texts(root))


@pytest.mark.parametrize("losses", [[2.0], [0.0], [3.0, 3.0, 3.0], [-1.0, 1.0], [1e-12, 2e-12], [1e30, 2e30]])
def test_odd_runs_are_drawn_too(losses: list[float]) -> None:
    points = [(float(step), loss) for step, loss in enumerate(losses, 1)]
    root = ElementTree.fromstring(draw("x", points, []))
    assert all(0 <= y <= 540 and 0 <= x <= 960 for x, y in line(root, "smooth"))
    assert 1 <= len([t for t in texts(root) if t.strip()]) < 40


def test_a_name_cannot_break_the_picture() -> None:
    root = ElementTree.fromstring(draw('a<b>&"c"', [(1.0, 1.0)], []))
    assert 'a<b>&"c"' in texts(root)
    assert root.get("aria-label") == 'a<b>&"c"'
