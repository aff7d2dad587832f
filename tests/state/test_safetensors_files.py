"""Safetensors files: how they are cut, and what is refused in those that strangers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box, boxes_of_range, element_ranges, element_span, slices
from fullshard.state import load_safetensors
from fullshard.state.safetensors.files import TensorFile

INDEX = "model.safetensors.index.json"


@given(st.data())
def test_ranges_are_the_elements_of_a_box_in_as_few_runs_as_can_be(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    box = Box(tuple(a for a, _ in ends), tuple(max(1, b - a) for a, b in ends))
    numbers = torch.arange(Box.whole(shape).numel).view(shape)
    expected = numbers[slices(box, Box.whole(shape))].reshape(-1).tolist()
    assert [n for elements in element_ranges(shape, box) for n in elements] == expected
    assert element_span(shape, box) == range(expected[0], expected[-1] + 1)
    (middle,) = boxes_of_range((4, 3, 2), range(6, 18))
    assert list(element_ranges((4, 3, 2), middle)) == [range(6, 18)]


# Files of strangers


def header(table: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
DAMAGED = {
    "empty": b"",
    "shorter than a length": b"1234567",
    "header beyond the end": header({"a": entry()}, EIGHT, length=10**6),
    "header of any size": header({"a": entry()}, EIGHT, length=2**63),
    "not JSON": header(b"{'a'", EIGHT),
    "not text": header(b"\xff\xfe{}", EIGHT),
    "nested without end": header(b"[" * 200_000),
    "a list": header([1, 2]),
    "an entry that is none": header({"a": 3}, EIGHT),
    "no dtype": header({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "a dtype that is a number": header({"a": entry(dtype=4)}, EIGHT),
    "a negative size": header({"a": entry(shape=[-1, -2])}, EIGHT),
    "a size that is a bool": header({"a": entry(shape=[2, True])}, EIGHT),
    "a fractional size": header({"a": entry(shape=[2.0])}, EIGHT),
    "a huge size": header({"a": entry(shape=[2**62, 4])}, EIGHT),
    "offsets beyond the end": header({"a": entry(shape=[4], offsets=[0, 16])}, EIGHT),
    "offsets in the wrong order": header({"a": entry(shape=[0], offsets=[8, 0])}, EIGHT),
    "negative offsets": header({"a": entry(offsets=[-8, 0])}, EIGHT),
    "three offsets": header({"a": entry(offsets=[0, 8, 8])}, EIGHT),
    "fewer bytes than the shape has": header({"a": entry(shape=[3])}, EIGHT),
    "a name twice": header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        EIGHT,
    ),
    "tensors that overlap": header(
        {"a": entry(), "b": entry(offsets=[4, 12])}, EIGHT + EIGHT[:4]
    ),
    "a gap": header({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
    "a gap at the start": header({"a": entry(offsets=[4, 12])}, bytes(12)),
    "more than its tensors": header({"a": entry()}, bytes(9)),
    "truncated": header({"a": entry()}, bytes(7)),
}  # fmt: skip


class Pair(nn.Module):
    def __init__(self, values: Tensor | None = None) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2) if values is None else values)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_before_anything_is_read(tmp_path, kind):
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[kind])
    model = Pair()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* is not a safetensors file"):
        load_safetensors(tmp_path, model)
    assert torch.equal(model.a, torch.ones(2))


def test_a_file_is_read_as_it_is_also_if_nothing_is_aligned(tmp_path):
    content = (
        b"\x01" + torch.tensor([1.5, -2.0]).view(torch.uint8).numpy().tobytes() + b"\x00\x07\x02"
    )
    table = {
        "flag": entry("BOOL", [1], [0, 1]),
        "a": entry("F32", [2], [1, 9]),
        "flags": entry("BOOL", [3], [9, 12]),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(json.dumps(table).encode().ljust(193), content))
    model = Pair()
    found = load_safetensors(path, model, strict=False)
    assert torch.equal(model.a, torch.tensor([1.5, -2.0]))
    assert sorted(found.unexpected) == ["flag", "flags"]
    flags = TensorFile(path).view("flags", Box((0,), (3,)))
    assert flags.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_dtype_that_torch_does_not_have_is_reported(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"a": entry("F4", [2], [0, 1])}, b"\x00"))
    with pytest.raises(CheckpointError, match="a: its dtype F4 is none of torch's"):
        load_safetensors(path, Pair())


def good_file(path: Path, **tensors: Tensor) -> None:
    save_file(tensors, path)


INDEXES = {
    "out of the folder": ({"a": "../secret.safetensors"}, "outside of the folder"),
    "absolute": ({"a": "/secret.safetensors"}, "outside of the folder"),
    "not a name": ({"a": 3}, "must be text, not 3"),
    "not a mapping": (["a"], "weight_map"),
    "a file that is not there": ({"a": "gone.safetensors"}, r"there is no 'gone\.safetensors'"),
    "a tensor that is not there": ({"b": "x.safetensors"}, "no 'b' in 'x.safetensors'"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_that_cannot_be_right_is_refused(tmp_path, kind):
    weight_map, words = INDEXES[kind]
    folder = tmp_path / "folder"
    folder.mkdir()
    good_file(tmp_path / "secret.safetensors", a=torch.zeros(2))
    good_file(folder / "x.safetensors", a=torch.zeros(2))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    model = Pair()
    with pytest.raises(CheckpointError, match=words):
        load_safetensors(folder, model)
    assert torch.equal(model.a, torch.ones(2))


def test_a_tensor_that_the_index_does_not_name_is_unexpected(tmp_path):
    good_file(tmp_path / "x.safetensors", a=torch.zeros(2), b=torch.zeros(1))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"not in the model: \['b'\]"):
        load_safetensors(tmp_path, Pair())


def test_a_path_is_a_file_a_folder_or_an_index(tmp_path):
    values = torch.tensor([3.0, 4.0])
    (tmp_path / "blobs").mkdir()
    good_file(tmp_path / "blobs" / "1234", a=values)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "adapter.safetensors").symlink_to("../blobs/1234")  # as caches are
    index = {"weight_map": {"a": "adapter.safetensors"}}
    for path in (
        tmp_path / "hub",
        tmp_path / "hub" / "adapter.safetensors",
        str(tmp_path / "hub" / "adapter.safetensors"),
    ):
        model = Pair()
        load_safetensors(path, model)
        assert torch.equal(model.a, values)
    (tmp_path / "hub" / "adapter.safetensors.index.json").write_text(json.dumps(index))
    good_file(tmp_path / "hub" / "another.safetensors", a=values + 1)
    for path in (tmp_path / "hub", tmp_path / "hub" / "adapter.safetensors.index.json"):
        model = Pair()
        load_safetensors(path, model)
        assert torch.equal(model.a, values)


def test_a_folder_that_may_mean_several_things_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="but has none"):
        load_safetensors(tmp_path, Pair())
    for name in ("x", "y"):
        good_file(tmp_path / f"{name}.safetensors", a=torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"but has \['x\.safetensors', 'y\.safetensors'\]"):
        load_safetensors(tmp_path, Pair())
    with pytest.raises(CheckpointError, match="does not exist"):
        load_safetensors(tmp_path / "gone", Pair())
