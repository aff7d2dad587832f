"""Checkpoints on disk: read in any cut, verified to the last bit, and never trusted."""

import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard.errors import CheckpointError, UnknownNameError
from fullshard.layout.split import Box
from fullshard.state.checkpoint.load import load
from fullshard.state.checkpoint.manifest import Manifest, StoredBlock, StoredTensor, read_manifest
from fullshard.state.checkpoint.reader import Problem, open_checkpoint, verify
from fullshard.state.checkpoint.save import write_checkpoint
from fullshard.state.shards import LocalPart
from fullshard.state.stored import TensorSource
from tests.support.stored import content, holds, write

KEYS = sorted(content(0))
many = settings(derandomize=True, deadline=None, max_examples=40)


def subjects(problems: list[Problem]) -> set[str]:
    return {problem.subject for problem in problems}


def flip(path: Path, place: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1 << bit
    path.write_bytes(raw)


def by_torch(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is on purpose
        dcp.save(state, checkpoint_id=path, no_dist=True)


def reindexed(path: Path, change: Callable[[Metadata], Any]) -> None:
    """Change the index with care; the manifest knows the new size of its file."""
    file = path / ".metadata"
    index = pickle.loads(file.read_bytes())
    changed = change(index)
    file.write_bytes(pickle.dumps(index if changed is None else changed))
    believe_sizes(path)


def believe_sizes(path: Path) -> None:
    """Remove the manifest: torch could have written the rest, and files are taken as they are."""
    for name in ("manifest.json", "rank_00000.pt", "rank_00001.pt"):
        (path / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to copy, which is faster than writing one."""
    path = tmp_path_factory.mktemp("written") / "step_1"
    write(path, seed=1, step=1)
    return path


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "step_1")


# Damage


def test_a_flipped_bit_names_the_tensor(path: Path) -> None:
    opened = open_checkpoint(path)
    for key in KEYS:
        for where, values in opened.load_all(key):
            file = opened.entry(key, where).path
            raw = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            place = file.read_bytes().index(raw)
            for at in (place, place + len(raw) - 1):
                flip(file, at, bit=7)
                (problem,) = verify(path)
                flip(file, at, bit=7)
                assert problem.subject == key
                assert file.name in problem.what
                assert str(where.offsets) in problem.what
    assert verify(path) == []


FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "rank_00001.pt", "manifest.json"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_noticed_or_without_effect(path: Path, name: str) -> None:
    whole = (path / name).read_bytes()
    num_noticed = 0
    places = range(0, len(whole), max(1, len(whole) // 40))
    for place in places:
        flip(path / name, place, bit=place % 8)
        if verify(path):
            num_noticed += 1
        else:
            assert holds(path, seed=1)
            state = torch.load(path / "rank_00001.pt", weights_only=True)
            assert state["extra"] == {"position": 10, "note": ""}
        (path / name).write_bytes(whole)
    assert num_noticed > len(places) / 10


@pytest.mark.exhaustive
def test_any_flipped_bit_of_an_index_ends_in_a_checkpoint_error_or_without_effect(
    tmp_path: Path,
) -> None:
    """The index is one that torch wrote, with nothing beside it that tells what it was."""
    path = tmp_path / "it"
    model = nn.Linear(2, 1, bias=False)
    by_torch(path, {"model": model.state_dict(), "optim": {"param_groups": [{"lr": 0.5}]}})
    index = path / ".metadata"
    whole = index.read_bytes()
    num_refused = 0
    for place in range(len(whole)):
        flip(index, place, bit=place % 8)
        other = nn.Linear(2, 1, bias=False)
        try:
            opened = open_checkpoint(path)
            for key in opened.object_keys:
                opened.read_object(key)
            load(path, other)
        except CheckpointError:
            num_refused += 1
        else:
            assert torch.equal(other.weight, model.weight), place
        index.write_bytes(whole)
    assert num_refused > len(whole) / 2


def test_an_entry_in_place_of_the_names_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    """One bit of an offset can do that."""
    path, model = tmp_path / "it", nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    by_torch(path, dict(zip(("model", "optim"), states, strict=True)))
    load(path, model, optimizer)

    def swap(index: Metadata) -> None:
        names, number = (f"optim.param_groups.0.{each}" for each in ("params", "lr"))
        places = {place.fqn: place for place in index.storage_data}
        name = next(each for each in places if each.startswith(names))
        index.storage_data[places[name]] = index.storage_data[places[number]]

    reindexed(path, swap)
    with pytest.raises(CheckpointError, match=r"are \w+, not names"):
        load(path, model, optimizer)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_of_another_size_is_named(path: Path, name: str) -> None:
    file = path / name
    whole = file.read_bytes()
    for left in (None, 0, 1, len(whole) // 2, len(whole) - 1, len(whole) + 4):
        if left is None:
            file.unlink()
        else:
            file.write_bytes((whole + b"more")[:left])
        if name != "manifest.json" or left != len(whole) + 4:
            assert name in subjects(verify(path))
            with pytest.raises(CheckpointError):
                open_checkpoint(path)
        if name == "__0_0.distcp" and left in (None, 0, 1):
            assert subjects(verify(path)) == {name, *KEYS}
        if name == "manifest.json" and left is None:  # not taken for a checkpoint of torch's own
            with pytest.raises(CheckpointError, match=r"no manifest\.json"):
                open_checkpoint(path)
    file.write_bytes(whole)
    assert verify(str(path)) == []


@pytest.mark.parametrize("how", ["exchanged", "copied", "of another checkpoint"])
@pytest.mark.parametrize("kind", ["rank_0000{}.pt", "__{}_0.distcp", ".metadata", "manifest.json"])
def test_a_file_in_the_place_of_an_equal_one_is_noticed(
    path: Path, kind: str, how: str, tmp_path: Path
) -> None:
    """Sizes are equal, and so are the contents of tensors: no checksum tells them apart."""
    whole, other = tmp_path / "even", tmp_path / "other" / "even"
    ones = TensorSource((4, 4), torch.float32, (), lambda box: torch.ones(box.sizes))
    equal = {"model.weight": ones}
    for folder in (whole, other):
        write_checkpoint(folder, equal, num_files=2, rank_states=[{"extra": {}}] * 2)
    first, second = kind.format(0), kind.format(1)
    assert (whole / first).stat().st_size == (whole / second).stat().st_size
    if how == "of another checkpoint":
        shutil.copy(other / first, whole)
    elif first == second:
        return  # there is only one
    else:
        content = (whole / first).read_bytes()
        (whole / first).write_bytes((whole / second).read_bytes())
        if how == "exchanged":
            (whole / second).write_bytes(content)
    found = {first, second} if how == "exchanged" else {first}
    if kind == "manifest.json":
        found = {".metadata"}
    problems = verify(whole)
    assert subjects(problems) == found
    assert all(
        "were exchanged, copied or damaged" in problem.what or "instead of" in problem.what
        for problem in problems
    )
    with pytest.raises(CheckpointError):
        load(whole, Weighted())


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


def test_a_file_of_another_checkpoint_is_noticed(path: Path) -> None:
    other = path.with_name("step_2")
    write(other, seed=2)
    found: dict[str, set[str]] = {}
    for name in ("__1_0.distcp", "rank_00001.pt"):
        mixed = shutil.copytree(path, path.with_name(f"mixed_{name}"))
        shutil.copy(other / name, mixed)
        found[name] = subjects(verify(mixed))
    assert found["__1_0.distcp"] == {*KEYS, "__1_0.distcp"}
    assert found["rank_00001.pt"] == {"rank_00001.pt"}


def test_a_forged_number_of_blocks_is_refused_before_work_is_done_for_each(path: Path) -> None:
    manifest = read_manifest(path)
    tensor = manifest.tensors["model.weight"]
    blocks = tuple(StoredBlock((row, 0), (1, 4), tensor.checksum) for row in range(20_000))
    forged = {"model.weight": replace(tensor, shape=(20_000, 4), blocks=blocks)}
    (path / "manifest.json").write_text(replace(manifest, tensors=forged).to_json())
    (problem,) = verify(path)
    assert "20,000 blocks do not fit into files of " in problem.what


def test_blocks_that_do_not_tile_are_named(path: Path) -> None:
    def forget(index: Metadata) -> None:
        index.state_dict_metadata["model.weight"].chunks.pop()

    reindexed(path, forget)
    (problem,) = verify(path)
    assert problem.subject == "model.weight"
    assert "gaps or overlaps" in problem.what
    with pytest.raises(CheckpointError, match="gaps or overlaps"):
        open_checkpoint(path).read("model.weight")


def test_a_manifest_that_says_otherwise_than_the_index_is_noticed(path: Path) -> None:
    opened = open_checkpoint(path)
    manifest = opened.manifest
    stored = manifest.tensors["model.bias"]
    turned = replace(stored, dtype="float16")
    (path / "manifest.json").write_text(
        replace(manifest, tensors={**manifest.tensors, "model.bias": turned}).to_json()
    )
    (problem,) = verify(path)
    assert problem == Problem(
        "model.bias", "it is (3,) in bfloat16, but (3,) in float16 in the manifest"
    )


def test_shares_together_do_everything_once(path: Path) -> None:
    for name in ("__0_0.distcp", "rank_00001.pt"):
        (path / name).unlink()
    whole = verify(path)
    shares = [verify(path, share=(index, 3)) for index in range(3)]
    assert sorted(map(str, whole)) == sorted(str(each) for share in shares for each in share)
    assert all(len(share) < len(whole) for share in shares)


def test_progress_ends_with_all_bytes(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in content(1).values())
    assert len(seen) == len(KEYS)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


# Reading


def held(tensor: torch.Tensor) -> TensorSource:
    part = LocalPart(Box.whole(tensor.shape), tensor)
    return TensorSource.of_parts(tensor.shape, tensor.dtype, [part])


@many
@given(st.data())
def test_any_block_is_read_from_any_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    path = tmp_path_factory.mktemp("cut") / "it"
    num_files = data.draw(st.integers(1, 4))
    write_checkpoint(path, {"it": lazy(tensor)}, num_files=num_files)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    where = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    opened = open_checkpoint(path)
    assert torch.equal(opened.read("it", where), tensor[tuple(slice(*end) for end in ends)])
    assert torch.equal(opened.read("it"), tensor)
    assert sum(block.numel() for _, block in opened.load_all("it")) == tensor.numel()


def test_only_the_files_that_are_needed_are_read(path: Path) -> None:
    opened = open_checkpoint(path)
    (path / "__0_0.distcp").unlink()
    found = opened.read("model.weight", Box((3, 1), (3, 2)))
    assert torch.equal(found, content(1)["model.weight"][3:, 1:3])
    with pytest.raises(CheckpointError, match="__0_0"):
        opened.read("model.weight", Box((2, 1), (4, 2)))


def test_what_is_not_there_is_said_by_name(path: Path) -> None:
    opened = open_checkpoint(path)
    for ask in (opened.info, opened.read, opened.read_object):
        with pytest.raises(UnknownNameError, match=r"no tensor of this name|no such entry"):
            ask("nothing")
    for where in (Box((0,), (1,)), Box((5, 0), (2, 4)), Box((-1, 0), (2, 4))):
        with pytest.raises(UnknownNameError, match="inside of"):
            opened.read("model.weight", where)


def test_what_torch_wrote_is_opened_and_verified(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(4, 3).t(), "n": torch.tensor(2)},
        "optimizer": {"param_groups": [{"lr": 0.5}], "betas": (0.9, 0.99)},
    }
    path = tmp_path / "by_torch"
    by_torch(path, state)
    opened = open_checkpoint(path)
    assert not opened.manifest.is_ours
    assert sorted(opened.keys) == ["model.n", "model.w"]
    assert torch.equal(opened.read("model.w"), state["model"]["w"])
    assert torch.equal(opened.read("model.n"), state["model"]["n"])
    assert opened.read_object("optimizer.param_groups.0.lr") == 0.5
    assert verify(path) == []
    (file,) = path.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    assert subjects(verify(path)) & {"model.w", "model.n"}


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("file", "is a file"),
        ("nowhere", "does not exist"),
        ("empty", "no .metadata"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(tmp_path / name)
        assert verify(tmp_path / name) != []


def test_ours_without_its_manifest_is_not_taken_for_torchs(path: Path) -> None:
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        open_checkpoint(path)
    assert subjects(verify(path)) == {"manifest.json"}


def test_an_unfinished_one_is_not_opened(path: Path) -> None:
    unfinished = path.rename(path.with_name(f".step_1.incoming-{'0' * 32}"))
    with pytest.raises(CheckpointError, match="not written to its end"):
        open_checkpoint(unfinished)
    assert subjects(verify(unfinished)) == {unfinished.name}


# Writing


def lazy(tensor: torch.Tensor) -> TensorSource:
    def read(where: Box) -> torch.Tensor:
        ends = zip(where.offsets, where.sizes, strict=True)
        return tensor[tuple(slice(offset, offset + size) for offset, size in ends)]

    return TensorSource(tuple(tensor.shape), tensor.dtype, (), read)


def test_all_dtypes_come_back_here_and_in_torch(tmp_path: Path) -> None:
    dtypes = [
        torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int64, torch.uint32,
    ]  # fmt: skip
    tensors = {str(dtype): (torch.randn(5, 3) * 9).abs().to(dtype) for dtype in dtypes}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 3)
    tensors["wide"] = torch.randn(2, 9).t()
    write_checkpoint(tmp_path / "it", {k: lazy(v) for k, v in tensors.items()}, num_files=3)
    assert verify(tmp_path / "it") == []
    opened = open_checkpoint(tmp_path / "it")
    into = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=tmp_path / "it", no_dist=True)
    for key, tensor in tensors.items():
        for found in (opened.read(key), into[key]):
            assert found.dtype == tensor.dtype
            assert (
                found.contiguous()
                .view(-1)
                .view(torch.uint8)
                .equal(tensor.contiguous().view(-1).view(torch.uint8))
            )


def test_another_cut_has_the_same_checksums(path: Path) -> None:
    opened = open_checkpoint(path)
    manifest = opened.manifest
    sums = {key: stored.checksum for key, stored in manifest.tensors.items()}
    write_checkpoint(
        path.with_name("again"),
        {key: replace(TensorSource.of_stored(opened, key), boxes=()) for key in opened.keys},
        manifest,
        num_files=5,
        rank_states=[{"extra": {"position": 1}}, {"extra": {"position": 2}}],
    )
    again = read_manifest(path.with_name("again"))
    assert {key: stored.checksum for key, stored in again.tensors.items()} == sums
    assert (again.step, again.num_ranks, again.extra) == (1, 2, ("position",))
    assert again.optimizer == manifest.optimizer
    assert again.id != manifest.id
    assert holds(path.with_name("again"), seed=1)
    assert verify(path.with_name("again")) == []
    states = [
        torch.load(path.with_name("again") / f"rank_0000{rank}.pt", weights_only=True)
        for rank in range(2)
    ]
    assert [state["extra"]["position"] for state in states] == [1, 2]
    assert len(list(path.with_name("again").glob("__*_0.distcp"))) == 5


def test_other_content_than_announced_is_not_written(path: Path) -> None:
    opened = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"model\.bias"):
        write_checkpoint(
            path,
            {key: TensorSource.of_stored(opened, key) for key in opened.keys},
            Manifest(tensors={"model.bias": StoredTensor((3,), "bfloat16", "0" * 16, ())}),
        )
    assert os.listdir(path.parent) == ["step_1"]
    assert holds(path, seed=1)


def test_parts_with_a_gap_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    tensor = torch.zeros(4, 2)
    gap = TensorSource.of_parts((4, 2), tensor.dtype, [LocalPart(Box((0, 0), (3, 2)), tensor[:3])])
    with pytest.raises(CheckpointError, match="do not cover its shape"):
        write_checkpoint(tmp_path / "it", {"it": gap})
    assert os.listdir(tmp_path) == []


# Strangers


class Call:
    """An object that unpickles into a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("call", [os.system, os.mkdir, eval, exec, open])
def test_an_index_that_names_a_call_is_refused_without_running_it(
    path: Path, call: Callable[..., Any]
) -> None:
    trace = path.parent / "trace"
    argument = {os.system: f"touch {trace}", os.mkdir: str(trace)}.get(
        call, f"__import__('os').mkdir({str(trace)!r})"
    )
    arguments = (str(trace), "w") if call is open else (argument,)
    reindexed(path, lambda index: Call(call, *arguments))
    with pytest.raises(CheckpointError, match="not a class of the checkpoint format"):
        open_checkpoint(path)
    assert subjects(verify(path)) == {".metadata"}
    assert not trace.exists()


def test_a_tensor_that_names_a_call_is_refused_without_running_it(path: Path) -> None:
    trace = path.parent / "trace"
    opened = open_checkpoint(path)
    where = opened.info("model.weight").boxes[0]
    entry = opened.entry("model.weight", where)
    torch.save(Call(os.mkdir, str(trace)), path / "own.distcp")
    size = (path / "own.distcp").stat().st_size

    def elsewhere(index: Metadata) -> None:
        stored = index.storage_data[MetadataIndex("model.weight", where.offsets)]
        stored.relative_path, stored.offset, stored.length = "own.distcp", 0, size

    reindexed(path, elsewhere)
    with pytest.raises(CheckpointError, match=r"model\.weight"):
        open_checkpoint(path).read("model.weight")
    assert subjects(verify(path)) == {"model.weight"}
    assert not trace.exists()
    assert entry.length > 0


def test_an_index_that_claims_more_than_its_files_allocates_nothing(path: Path) -> None:
    def claim(index: Metadata) -> None:
        stored = index.state_dict_metadata["model.weight"]
        stored.size = torch.Size([10**12, 10**3])
        stored.chunks[0].offsets = torch.Size([0, 0])
        stored.chunks[0].sizes = stored.size
        del stored.chunks[1:]

    reindexed(path, claim)
    opened = open_checkpoint(path)
    for read in (
        lambda: opened.read("model.weight"),
        lambda: list(opened.load_all("model.weight")),
    ):
        with pytest.raises(CheckpointError, match="4000000000000000 bytes"):
            read()
    (problem,) = verify(path)
    assert problem.subject == "model.weight"


def test_an_index_that_repeats_a_block_is_refused(path: Path) -> None:
    """Such an index is small: a pickle refers back to what it has already."""

    def repeat(index: Metadata) -> None:
        stored = index.state_dict_metadata["model.weight"]
        stored.chunks = 200_000 * stored.chunks[:1]

    reindexed(path, repeat)
    with pytest.raises(CheckpointError, match="200004 blocks, and 6 parts of files"):
        open_checkpoint(path)
    assert subjects(verify(path)) == {".metadata"}


def test_an_index_with_a_block_twice_in_place_of_another_does_not_tile(path: Path) -> None:
    def repeat(index: Metadata) -> None:
        stored = index.state_dict_metadata["model.weight"]
        stored.chunks = 2 * stored.chunks[:1]

    reindexed(path, repeat)
    (problem,) = verify(path)
    assert problem.subject == "model.weight"
    assert "gaps or overlaps" in problem.what


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04Nr\xff\xff\xff\xff.",  # an object with number 4294967295
        b"\x80\x02Np99999999999\n.",
        b"\x80\x04\x8c\x01rr\xff\xff\xff\xff.",
        b"\x80\x04ctorch\nSize\nr\xff\xff\xff\xff.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a terabyte of bytes
    ],
    ids=range(5),
)
def test_an_index_that_asks_for_more_than_it_is_is_refused(path: Path, content: bytes) -> None:
    believe_sizes(path)
    (path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="not an index of torch"):
        open_checkpoint(path)


def archive(path: Path, size: int, compression: int) -> None:
    """What `torch.save` writes, with a tensor's bytes compressed."""
    torch.save(torch.zeros(6, 4), path)
    with zipfile.ZipFile(path) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, values in members.items():
            target.writestr(name, bytes(size) if name.endswith("/data/0") else values)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_claims_more_than_its_file_is_refused(
    tmp_path: Path, compression: int
) -> None:
    path = tmp_path / "it"
    by_torch(path, {"w": torch.zeros(6, 4)})
    archive(path / "own.distcp", 10**7 if compression else 6 * 4 * 4, compression)
    if compression == zipfile.ZIP_STORED:
        raw = (path / "own.distcp").read_bytes()
        real, claimed = (6 * 4 * 4).to_bytes(4, "little"), (2**31).to_bytes(4, "little")
        assert raw.count(real) >= 4
        (path / "own.distcp").write_bytes(raw.replace(real, claimed))
    size = (path / "own.distcp").stat().st_size

    def elsewhere(index: Metadata) -> None:
        (stored,) = index.storage_data.values()
        stored.relative_path, stored.offset, stored.length = "own.distcp", 0, size

    reindexed(path, elsewhere)
    with pytest.raises(CheckpointError, match=r"compressed|larger inside"):
        open_checkpoint(path).read("w")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", 3, None, b"x"])
def test_a_file_outside_is_not_opened(path: Path, name: Any) -> None:
    def elsewhere(index: Metadata) -> None:
        for stored in index.storage_data.values():
            stored.relative_path = name

    shutil.copy(path / "__0_0.distcp", path.parent / "outside")
    reindexed(path, elsewhere)
    with pytest.raises(CheckpointError, match=r"not a file name|inside|outside"):
        open_checkpoint(path)
    assert subjects(verify(path)) == {".metadata"}
    for other in ([], {}, torch.Size([1])):  # no index at all
        reindexed(path, lambda index, other=other: other or [None])
        with pytest.raises(CheckpointError, match="index"):
            open_checkpoint(path)


def test_a_link_that_leads_out_is_not_followed(path: Path) -> None:
    (path / "__0_0.distcp").rename(path.parent / "outside")
    (path / "__0_0.distcp").symlink_to(path.parent / "outside")
    with pytest.raises(CheckpointError, match="leads out"):
        open_checkpoint(path).read("model.weight")
    assert subjects(verify(path)) == set(KEYS)


ODD = st.sampled_from(
    [None, -1, 2**70, 1.5, "x", "..", b"", (), [1], {}, {"a": 1}, True, torch.Size([1]), torch.int8]
)


@many
@given(st.data())
def test_whatever_an_index_says_is_read_or_refused(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = shutil.copytree(written, tmp_path_factory.mktemp("odd") / "it")

    def change(index: Metadata) -> None:
        stored = index.state_dict_metadata["model.weight"]
        info = index.storage_data[MetadataIndex("model.weight", (0, 0))]
        places = [
            (index, "state_dict_metadata"), (index, "storage_data"), (index, "storage_meta"),
            (stored, "size"), (stored, "chunks"), (stored, "properties"),
            (stored.properties, "dtype"),
            (stored.chunks[0], "offsets"), (stored.chunks[0], "sizes"),
            (info, "relative_path"), (info, "offset"), (info, "length"),
            (info, "transform_descriptors"),
        ]  # fmt: skip
        at, name = data.draw(st.sampled_from(places))
        setattr(at, name, data.draw(ODD))

    reindexed(path, change)
    for problem in verify(path):
        assert problem.subject in (".metadata", *KEYS)
    try:
        found = open_checkpoint(path).read("model.weight")
    except (CheckpointError, UnknownNameError):
        return
    assert torch.equal(found, content(1)["model.weight"])
