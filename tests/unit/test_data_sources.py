"""Text sources: deterministic bytes, splits that share nothing, windows that count every byte once."""

from __future__ import annotations

import hashlib
import itertools
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrun.data.sources import IGNORE, ByteTextDataset, Split, Text, builtin_text, read_text, split_ranges
from shardrun.errors import UsageError

SPLITS: st.SearchStrategy[Split] = st.sampled_from(["train", "val"])


def test_builtin_text_is_english_of_a_useful_size_and_the_same_each_time() -> None:
    text = read_text("builtin")
    assert text == builtin_text()
    assert 200_000 < len(text.content) < 2_000_000
    assert text.content.startswith(b'The "assert" statement')
    assert text.sha256 == hashlib.sha256(text.content).hexdigest()


def test_builtin_text_holds_every_paragraph_once() -> None:
    paragraphs = builtin_text().content.decode().split("\n\n")
    written = {part.strip() for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n")} - {""}
    stripped = [paragraph.strip() for paragraph in paragraphs]
    assert len(set(stripped)) == len(stripped)
    assert set(stripped) == written


def test_globs_are_sorted_joined_once_and_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    for name, content in (("b.txt", b"bb"), ("a.txt", b"aa"), ("deep/c.txt", b"cc"), ("d.md", b"dd")):
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    assert read_text(["**/*.txt", "a.*"]) == Text(b"aa\nbb\ncc", ("a.txt", "b.txt", "deep/c.txt"))
    assert read_text(str(tmp_path / "*.md")).content == b"dd"


def test_a_glob_without_files_and_files_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\*\.txt' matches no file"):
        read_text(str(tmp_path / "none*.txt"))
    (tmp_path / "empty.txt").write_bytes(b" \n")
    with pytest.raises(UsageError, match="hold no text"):
        read_text(str(tmp_path / "*.txt"))


@settings(deadline=None)
@given(st.integers(10, 300_000))
def test_splits_cover_the_text_and_share_nothing(length: int) -> None:
    train, val = split_ranges(length, "train"), split_ranges(length, "val")
    pieces = sorted(train + val)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(pieces))
    share = sum(stop - start for start, stop in val) / length
    assert 0.04 < share <= 0.1  # every tenth block, and what is behind the last one is for training


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="split 'test' is unknown"):
        split_ranges(100, "test")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(40, 3000), st.integers(1, 70), SPLITS)
def test_every_byte_is_a_label_once(length: int, context: int, split: Split) -> None:
    text = Text(bytes(i * 7 % 251 for i in range(length)), ())
    dataset = ByteTextDataset(text, split, context=context)
    labelled: list[int] = []
    for index in range(len(dataset)):
        inputs, labels = dataset[index]
        assert inputs.shape == labels.shape == (context,)
        assert inputs.dtype == labels.dtype == torch.int64
        counted = labels[labels != IGNORE]
        assert counted.numel() >= 1
        assert torch.equal(inputs[1 : counted.numel()], counted[:-1])  # a label is the next input
        assert (labels[counted.numel() :] == IGNORE).all()
        labelled += counted.tolist()
    assert labelled == [byte for start, stop in split_ranges(length, split) for byte in text.content[start + 1 : stop]]


def test_a_smaller_stride_overlaps() -> None:
    text = Text(bytes(range(100)), ())
    dataset = ByteTextDataset(text, "train", context=8, stride=4)
    assert dataset[0][0].tolist() == list(range(8))
    assert dataset[1][0].tolist() == list(range(4, 12))
    assert len(dataset) > len(ByteTextDataset(text, "train", context=8))


@pytest.mark.parametrize(("context", "stride"), [(0, None), (8, 0), (8, 9)])
def test_impossible_windows_are_refused(context: int, stride: int | None) -> None:
    with pytest.raises(UsageError, match="stride at most context"):
        ByteTextDataset(Text(bytes(range(100)), ()), "train", context=context, stride=stride)


def test_a_text_too_short_for_a_split_is_refused() -> None:
    with pytest.raises(UsageError, match="the val split of a text of 3 bytes has no window"):
        ByteTextDataset(Text(b"abc", ()), "val", context=2)


def test_the_identity_covers_all_that_decides_the_items() -> None:
    text = Text(bytes(range(200)), ("a",))
    identity = ByteTextDataset(text, "train", context=8).identity
    assert ByteTextDataset(Text(text.content, ("moved",)), "train", context=8).identity == identity
    others = [
        ByteTextDataset(text, "val", context=8),
        ByteTextDataset(text, "train", context=9),
        ByteTextDataset(text, "train", context=8, stride=4),
        ByteTextDataset(Text(text.content[:-1] + b"!", ("a",)), "train", context=8),
    ]
    assert len({identity, *(dataset.identity for dataset in others)}) == 5
