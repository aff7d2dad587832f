"""Manifests: what is written is read, and nothing that is damaged or foreign is believed."""

import datetime
import json
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import CheckpointError
from fullshard.layout.split import boxes_of_range
from fullshard.state.checkpoint.index import as_text, joined
from fullshard.state.checkpoint.manifest import (
    Manifest,
    StoredBlock,
    StoredTensor,
    digest_of,
    read_manifest,
)

many = settings(derandomize=True, deadline=None, max_examples=20)

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "complex64", "bool", "int64"]
NAMES = st.text(max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def stored_tensors(draw: st.DrawFn) -> StoredTensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    numel = torch.Size(shape).numel()
    cut = draw(st.integers(0, numel))
    places = [
        where for run in (range(cut), range(cut, numel)) for where in boxes_of_range(shape, run)
    ]
    sums = [draw(st.integers(0, 2**64 - 1)) for _ in places]
    blocks = tuple(
        StoredBlock(where.offsets, where.sizes, as_text(each))
        for where, each in zip(places, sums, strict=True)
    )
    return StoredTensor(shape, draw(st.sampled_from(DTYPES)), as_text(joined(sums)), blocks)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    files = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=12)
    groups = st.dictionaries(NAMES.filter(lambda n: n != "params"), PLAIN, max_size=3)
    optimizers = st.fixed_dictionaries(
        {
            "param_groups": st.lists(
                st.builds(lambda group, names: {**group, "params": names}, groups, st.lists(NAMES)),
                max_size=2,
            ),
            "values": st.dictionaries(NAMES, st.dictionaries(NAMES, PLAIN, max_size=2), max_size=2),
        }
    )
    return Manifest(
        id=draw(st.uuids()).hex,
        created=draw(st.datetimes(timezones=st.just(datetime.UTC))).isoformat(),
        step=draw(st.none() | st.integers(0, 2**40)),
        num_ranks=draw(st.integers(1, 4096)),
        versions=draw(st.dictionaries(NAMES, NAMES, max_size=2)),
        tensors=draw(st.dictionaries(NAMES, stored_tensors(), max_size=3)),
        aliases=draw(st.dictionaries(NAMES, NAMES, max_size=2)),
        optimizer=draw(st.none() | optimizers),
        files=draw(
            st.dictionaries(
                files.filter(lambda name: name not in (".", "..", "manifest.json")),
                st.integers(0, 2**50),
                max_size=3,
            )
        ),
        selection=draw(NAMES),
        extra=tuple(draw(st.lists(NAMES, max_size=3))),
    )


def example(**changes: Any) -> Manifest:
    blocks = (
        StoredBlock((0, 0), (2, 3), as_text(2**64 - 1)),
        StoredBlock((2, 0), (2, 3), as_text(6)),
    )
    found = Manifest(
        id="0123456789abcdef" * 2,
        created="2026-01-31T12:00:00+00:00",
        step=7,
        num_ranks=2,
        versions={"fullshard": "0.1.0", "torch": "2.13.0"},
        tensors={"model.weight": StoredTensor((4, 3), "float32", as_text(5), blocks)},
        aliases={"head.weight": "weight"},
        optimizer={
            "param_groups": [{"lr": 0.1, "params": ["weight"]}],
            "values": {"weight": {"step": 3}},
        },
        files={".metadata": 10, "__0_0.distcp": 20, "rank_00000.pt": 30},
        selection="all",
        extra=("scheduler",),
    )
    return replace(found, **changes)


def read(text: str) -> Manifest:
    return Manifest.from_json(text, "here")


def tampered(change: Callable[[dict[str, Any]], Any]) -> str:
    """A manifest that someone changed with care: the checksum of its text is right."""
    body = json.loads(example().to_json())["manifest"]
    change(body)
    text = json.dumps(body)
    return json.dumps(
        {
            "format": "fullshard checkpoint",
            "version": 1,
            "sha256": digest_of(text),
            "manifest": body,
        }
    )


@many
@given(manifests())
def test_what_is_written_is_read(manifest: Manifest) -> None:
    assert read(manifest.to_json()) == manifest


def test_numbers_come_back_to_the_last_bit() -> None:
    values = [0.1, 1e-300, 5e-324, float("inf"), -0.0, 2**70, 1 / 3]
    groups = [{"params": [], "values": values}]
    found = read(example(optimizer={"param_groups": groups, "values": {}}).to_json())
    assert found.optimizer is not None
    assert list(map(repr, found.optimizer["param_groups"][0]["values"])) == list(map(repr, values))


def test_keys_that_json_turns_into_text_do_not_break_it() -> None:
    optimizer = {"param_groups": [], "values": {"w": {9: 1, 10: 2}}}
    found = read(example(optimizer=optimizer).to_json())
    assert found.optimizer == {"param_groups": [], "values": {"w": {"9": 1, "10": 2}}}


@many
@given(st.data())
def test_any_damage_is_noticed(data: st.DataObject) -> None:
    text = example().to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(["cut", "drop", "change", "insert"]))
    other = data.draw(st.characters(codec="utf-8").filter(lambda c: c != text[place]))
    damaged = {
        "cut": text[:place],
        "drop": text[:place] + text[place + 1 :],
        "change": text[:place] + other + text[place + 1 :],
        "insert": text[:place] + other + text[place:],
    }[kind]
    try:
        found = read(damaged)
    except CheckpointError as error:
        assert str(error).startswith("here: ")  # noqa: PT017
    else:
        # Space between values, and a word for which JSON has two spellings, are no damage.
        assert found == example()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "{}" * 3, '{"a": 1, "a": 2}', "1" * 10_000, "nan", "\ufeff{}", "[]"],
    ids=range(9),
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        read(text)


@many
@given(st.data())
def test_a_field_of_another_kind_is_refused_or_fits(data: st.DataObject) -> None:
    """Whatever a stranger writes in one place, the answer is a manifest or a CheckpointError."""

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = data.draw(st.sampled_from(keys))
            inner = at[key]
            if not inner or not isinstance(inner, (dict, list)) or data.draw(st.booleans()):
                at[key] = data.draw(PLAIN | st.just(float("nan")) | st.integers())
                return
            at = inner

    try:
        found = read(tampered(change))
    except CheckpointError:
        return
    assert isinstance(found, Manifest)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        "manifest.json",
        "a\0b",
        "\ud800",
        "C:x",
        "x" * 300,
        "name\n",
    ],
)
def test_a_file_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="inside the checkpoint's folder"):
        read(tampered(lambda body: body["files"].update({name: 1})))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda b: b.update(step=-1), "step"),
        (lambda b: b.update(step=True), "step"),
        (lambda b: b.update(step=1.0), "step"),
        (lambda b: b.update(step=2**64), "step"),
        (lambda b: b.update(step=[[[]]]), "step"),
        (lambda b: b.update(num_ranks=0), "num_ranks"),
        (lambda b: b.update(created="yesterday"), "yesterday"),
        (lambda b: b.update(created="2026-01-31T12:00:00"), "zone"),
        (lambda b: b.update(created="2026-13-31T12:00:00Z"), "month"),
        (lambda b: b.update(extra="scheduler"), "extra"),
        (lambda b: b.update(extra=[1]), "extra"),
        (lambda b: b.update(versions={"torch": 2}), "versions"),
        (lambda b: b.update(aliases=[]), "aliases"),
        (lambda b: b.update(optimizer={}), "param_groups"),
        (lambda b: b["optimizer"].update(values=[]), "values"),
        (lambda b: b["optimizer"].update(values={"w": 1}), "values"),
        (lambda b: b["optimizer"]["param_groups"].append({}), "params"),
        (lambda b: b["optimizer"]["param_groups"].append({"params": [1]}), "params"),
        (lambda b: b["files"].update({"a": -1}), "'a' in files"),
        (lambda b: b["files"].update({"a": True}), "'a' in files"),
        (lambda b: b.pop("step"), "fields"),
        (lambda b: b.update(more=1), "fields"),
    ],
)
def test_an_impossible_value_is_refused_by_name(
    change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tampered(change))


def with_tensor(**changes: Any) -> str:
    return tampered(lambda body: body["tensors"]["model.weight"].update(changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"shape": [-4, -3]}, "shape"),
        ({"shape": [4.0, 3]}, "shape"),
        ({"dtype": 3}, "dtype"),
        ({"checksum": 5}, "checksum"),
        ({"blocks": [1]}, "blocks of"),
        ({"blocks": {}}, "a list"),
        ({"blocks": 20_000 * [{"offsets": [0], "sizes": [4], "checksum": "0"}]}, "there once"),
        ({"more": 1}, "shape"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)model.weight.*{words}|{words}.*model.weight"):
        read(with_tensor(**changes))


def test_a_later_format_is_refused_in_words() -> None:
    text = example().to_json().replace('"version": 2', '"version": 3')
    with pytest.raises(CheckpointError, match="which this fullshard reads, not 3"):
        read(text)


def test_a_manifest_on_disk_is_read_or_refused_in_words(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"no manifest\.json"):
            read_manifest(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        read_manifest(tmp_path / "file")
    (tmp_path / "manifest.json").write_text(example().to_json())
    assert read_manifest(tmp_path) == example()
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"no manifest\.json that can be read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest\.json that can be read"):
        read_manifest(tmp_path)
