"""`fullshard checkpoint`: what it shows, finds, compares and converts, and how it says so."""

import io
import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import AdamW

from fullshard import fully_shard
from fullshard.cli.commands import fullshard
from fullshard.layout.split import Box
from fullshard.state.checkpoint.load import load
from fullshard.state.checkpoint.manifest import read_manifest
from fullshard.state.checkpoint.reader import open_checkpoint
from fullshard.state.checkpoint.save import save, write_checkpoint
from fullshard.state.stored import TensorSource
from fullshard.testing import Rank, pool

# torch warns about every use without a process group, which is intended here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SHAPES = {
    "inner.weight": (6, 5),
    "norm.weight": (6,),
    "norm.bias": (6,),
    "outer.bias": (5,),
    "scale": (3,),
}


class Net(nn.Module):
    """With a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.outer = nn.Linear(6, 5)
        self.outer.weight = nn.Parameter(torch.zeros(5, 6))
        self.again = nn.Linear(5, 6, bias=False)
        self.again.weight = self.inner.weight
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x) + self.again(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_some(rank: Rank, folder: Path) -> None:
    """Two checkpoints of ours, one step apart, and one of torch's own."""
    torch.manual_seed(0)
    model = fully_shard(Net(), mesh=rank.mesh(rank.size))
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, seed=1)
    torch.manual_seed(100 + rank.rank)
    save(folder / "first", model, optimizer, step=10, extra={"position": 7})
    train(model, optimizer, seed=2)
    optimizer.param_groups[0]["lr"] = 0.02
    save(folder / "second", model, optimizer, step=11)
    torch.manual_seed(0)
    theirs = torch_fully_shard(Net(), mesh=rank.mesh(rank.size))
    their_optimizer = AdamW(theirs.parameters(), lr=0.01)
    train(theirs, their_optimizer, seed=1)
    states = dict(zip(("model", "optimizer"), get_state_dict(theirs, their_optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder / "torch")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    pool(2).run(save_some, folder)
    return folder


@pytest.fixture
def saved(made: Path, tmp_path: Path) -> Path:
    """Copies, to be damaged."""
    for path in made.iterdir():
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path


def run(*args: Any, expected: int = 0) -> Result:
    """`fullshard checkpoint ARGS`, in this process."""
    result = CliRunner().invoke(fullshard, ["checkpoint", *map(str, args)])
    assert result.exit_code == expected, result.output
    return result


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint of these, each cut along its first dim into two."""
    lazy = {key: lazily(values) for key, values in tensors.items()}
    write_checkpoint(path, lazy, num_files=2)
    return path


def lazily(values: torch.Tensor) -> TensorSource:
    def read(where: Box) -> torch.Tensor:
        part = values
        for dim, (offset, size) in enumerate(zip(where.offsets, where.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        return part.clone()

    return TensorSource(tuple(values.shape), values.dtype, (), read)


def model_of(path: Path) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(path)
    return {
        key.removeprefix("model."): opened.read(key)
        for key in opened.keys
        if key.startswith("model.")
    }


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


# info


def test_info_shows_every_tensor_and_where_the_checkpoint_comes_from(made):
    lines = [line.split() for line in run("info", made / "first").stdout.splitlines()]
    assert lines[-1][:2] == ["files", "6"]  # the summary is what a terminal still shows
    assert ["step", "10"] in lines
    assert ["selection", "all"] in lines
    assert ["extra", "position"] in lines
    assert ["tied", "again.weight", "=", "inner.weight"] in lines
    assert [
        "written",
        "by",
        "2",
        "ranks,",
        "fullshard",
        "0.1.0,",
        "torch",
        torch.__version__,
    ] in lines
    for name, shape in SHAPES.items():
        num_bytes = torch.Size(shape).numel() * 4
        # Buffers are whole on every rank, and written once.
        num_blocks = 1 if name == "scale" else 2
        shown = str(list(shape)).split()
        assert [f"model.{name}", *shown, "float32", str(num_bytes), str(num_blocks)] in lines
    assert ["rank_00001.pt", f"{(made / 'first' / 'rank_00001.pt').stat().st_size:,}"] in lines


def test_info_in_json_says_what_the_manifest_says(made):
    found = json.loads(run("info", made / "first", "--json").stdout)
    manifest = read_manifest(made / "first")
    assert found["written_by"] == "fullshard"
    for name in ("id", "created", "step", "num_ranks", "selection", "versions", "aliases"):
        assert found[name] == getattr(manifest, name)
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert set(tensors) == set(manifest.tensors)
    for key, stored in manifest.tensors.items():
        assert tuple(tensors[key]["shape"]) == stored.shape
        assert tensors[key]["checksum"] == stored.checksum
        assert tensors[key]["num_blocks"] == len(stored.blocks)
    assert found["num_bytes"] == sum(tensor["num_bytes"] for tensor in tensors.values())
    sizes = {path.name: path.stat().st_size for path in (made / "first").iterdir()}
    assert found["files"] == sizes


def test_info_of_a_checkpoint_that_torch_wrote_says_so(made):
    shown = run("info", made / "torch").stdout
    assert "torch.distributed.checkpoint itself: no manifest" in shown
    assert "optimizer.param_groups" in shown
    found = json.loads(run("info", made / "torch", "--json").stdout)
    assert (found["written_by"], found["step"]) == ("torch", None)
    assert all(key.startswith("optimizer.param_groups") for key in found["others"])
    assert {t["name"]: t["num_blocks"] for t in found["tensors"]}["model.inner.weight"] == 2
    assert "there is no manifest to compare them with" in run("verify", made / "torch").stdout


def test_a_name_cannot_speak_to_the_terminal(tmp_path):
    path = write(tmp_path / "odd", {"model.\x1b[31mred\n[bold]": torch.ones(2)})
    for command in ("info", "verify"):
        assert "\x1b" not in run(command, path).output
    assert "model.\\x1b[31mred\\n[bold]" in run("info", path).stdout


# verify


def test_verify_of_a_whole_checkpoint_tells_its_progress_in_plain_lines(made):
    result = run("verify", made / "first")
    assert re.search(r"first: complete, \d+ tensors, 6 files$", result.stdout.strip())
    assert re.search(r"^verifying: (.*) of \1$", result.stderr, flags=re.MULTILINE)
    assert "\x1b" not in result.output


def test_verify_names_the_tensor_whose_bit_changed(saved):
    opened = open_checkpoint(saved / "first")
    where = opened.info("model.inner.weight").boxes[1]
    entry = opened.entry("model.inner.weight", where)
    content = bytearray(entry.path.read_bytes())
    values = opened.load("model.inner.weight", where).contiguous().view(torch.uint8).numpy()
    at = content.index(values.tobytes(), entry.offset)
    content[at + 3] ^= 1
    entry.path.write_bytes(content)
    first, last = run("verify", saved / "first", expected=1).stdout.splitlines()
    assert first.startswith("model.inner.weight: ")
    assert last.endswith("first: damaged, 1 problem")
    # A reshard would give the damage a new manifest: it is refused.
    refused = run("reshard", saved / "first", saved / "out", "--files", 1, expected=2)
    assert "model.inner.weight" in refused.stderr
    assert not (saved / "out").exists()


# diff


def test_diff_says_how_far_values_lie_apart(made):
    result = run("diff", made / "first", made / "second", "--all", expected=1)
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    first, second = model_of(made / "first"), model_of(made / "second")
    apart = (first["inner.weight"].double() - second["inner.weight"].double()).abs()
    num = int((apart != 0).sum())
    largest = torch.maximum(first["inner.weight"].abs(), second["inner.weight"].abs()).double()
    share = float((apart / largest).nan_to_num().max())
    assert lines["model.inner.weight"] == (
        f"different content, max abs difference {float(apart.max()):.6g}, relative {share:.3g}, "
        f"{num} of 30 elements"
    )
    # The largest come first, ten of them unless all are asked for.
    sizes = [float(size) for size in re.findall(r"max abs difference ([\d.e-]+)", result.stdout)]
    assert len(sizes) > 10
    assert sizes == sorted(sizes, reverse=True)
    shorter = run("diff", made / "first", made / "second", expected=1).stdout.splitlines()
    assert shorter[:10] == result.stdout.splitlines()[:10]
    assert len(shorter) == 11
    assert shorter[10] == result.stdout.splitlines()[-1] + "; --all lists the others"
    assert lines["optimizer.param_groups[0].lr"] == "0.01 and 0.02"
    assert "model.scale" not in lines


def test_diff_reads_what_has_no_checksums(made):
    """Ours and torch's began with the same model, seed and step: they differ in nothing.

    Not in the tied weight either, which one has once, and the other under both of its names.
    """
    for other in ("first", "torch"):
        assert run("diff", made / "torch", made / other).stdout.startswith("no difference: ")
    result = run("diff", made / "torch", made / "second", "--all", expected=1)
    assert "model.inner.weight: different content, max abs" in result.stdout
    assert "model.again.weight: different content, max abs" in result.stdout


def test_diff_names_every_kind_of_difference(tmp_path):
    nan, inf = float("nan"), float("inf")
    one = {
        "model.same": torch.tensor([nan, inf, 1.0]),
        "model.shape": torch.ones(2, 3),
        "model.dtype": torch.ones(4),
        "model.zero": torch.tensor([0.0, 1.0]),
        "model.nan": torch.tensor([1.0, nan, inf, 5.0]),
        "model.inf": torch.tensor([1.0, inf, inf]),
        "model.count": torch.tensor([3, 2**40]),
        "model.flags": torch.tensor([True, False]),
        "model.gone": torch.ones(1),
    }
    other = {
        "model.same": one["model.same"].clone(),
        "model.shape": torch.ones(3, 2),
        "model.dtype": torch.full((4,), 1.5, dtype=torch.bfloat16),
        "model.zero": torch.tensor([-0.0, 1.0]),
        "model.nan": torch.tensor([1.0, nan, inf, nan]),
        "model.inf": torch.tensor([1.0, inf, -inf]),
        "model.count": torch.tensor([3, 2**40 - 1]),
        "model.flags": torch.tensor([True, True]),
        "model.new": torch.ones(1),
    }
    a, b = write(tmp_path / "a", one), write(tmp_path / "b", other)
    result = run("diff", a, b, expected=1)
    *lines, last = result.stdout.splitlines()
    assert dict(line.removeprefix("model.").split(": ", 1) for line in lines) == {
        "shape": "shape [2, 3] and [3, 2]",
        "dtype": "dtype float32 and bfloat16, max abs difference 0.5, relative 0.333, "
        "4 of 4 elements",
        "zero": "different content, equal values with different bits",
        "nan": "different content, max abs difference nan, relative nan, 1 of 4 elements",
        "inf": "different content, max abs difference inf, relative nan, 1 of 3 elements",
        "count": "different content, max abs difference 1, relative 9.09e-13, 1 of 2 elements",
        "flags": "different content, max abs difference 1, relative 1, 1 of 2 elements",
        "gone": "only in the first",
        "new": "only in the second",
    }
    assert last == "different: 9 differences, 1 tensor identical"


# reshard


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_resharded_checkpoint_loads_with_everything_that_it_had(made, tmp_path, num_files):
    out = tmp_path / "out"
    run("reshard", made / "first", out, "--files", num_files)
    assert len(list(out.glob("*.distcp"))) == num_files
    run("verify", out)
    assert run("diff", made / "first", out).stdout.startswith("no difference: ")
    # Random state belongs to a rank of the run, not to a file.
    assert read_manifest(out).num_ranks == 2
    for name in ("rank_00000.pt", "rank_00001.pt"):
        before, after = (torch.load(path / name) for path in (made / "first", out))
        assert torch.equal(before["random state"]["torch"], after["random state"]["torch"])
    model, optimizer = trainable()
    loaded = load(out, model, optimizer)
    assert (loaded.step, loaded.extra) == (10, {"position": 7})
    assert_equal(model.state_dict(), with_ties(model_of(made / "first")))
    assert optimizer.state[model.inner.weight]["step"] == 1
    run("reshard", out, out, "--files", 2)  # in its place
    assert len(list(out.glob("*.distcp"))) == 2
    assert_equal(model_of(out), model_of(made / "first"))


def trainable() -> tuple[Net, AdamW]:
    model = Net()
    return model, AdamW(model.parameters(), lr=1.0)


def with_ties(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "again.weight": state["inner.weight"]}


def test_what_is_no_tensor_is_left_out_only_when_asked(made, tmp_path):
    out = tmp_path / "out"
    refused = run("reshard", made / "torch", out, "--files", 1, expected=2)
    assert "optimizer.param_groups" in refused.stderr
    assert not out.exists()
    run("reshard", made / "torch", out, "--files", 1, "--tensors-only")
    state = {"model": Net().state_dict()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert_equal(state["model"], model_of(made / "torch"))


# export


def test_an_export_has_the_dtype_and_the_file_size_that_were_asked_for(made, tmp_path):
    assert "one: 1 file, " in run("export", made / "first", tmp_path / "one").stdout
    assert_equal(load_file(tmp_path / "one" / "model.safetensors"), model_of(made / "first"))
    out = tmp_path / "many"
    out.mkdir()
    (out / "config.json").write_text("{}")
    run("export", made / "first", out, "--dtype", "bfloat16", "--max-shard-bytes", "0.05kB")
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(weight_map.values())) == files
    found: dict[str, torch.Tensor] = {}
    for file in files:
        part = load_file(out / file)
        assert len(part) == 1 or sum(values.nbytes for values in part.values()) <= 50
        found |= part
    assert_equal(found, {n: v.bfloat16() for n, v in model_of(made / "first").items()})
    assert (out / "config.json").exists()
    for size in ("0", "-1", "5XB", "many", "inf", "nan"):
        refused = run("export", made / "first", out, f"--max-shard-bytes={size}", expected=2)
        assert "is not a number of bytes" in refused.stderr


def test_of_torchs_own_checkpoints_the_model_is_found(made, tmp_path):
    """Under "model", by itself, or where --prefix says; it is never guessed from dots in names."""
    state = {f"model.{n}": v.clone() for n, v in model_of(made / "first").items()}
    for name, tree in {
        "nested": {"model": state, "epoch": torch.ones(1)},
        "flat": state,
        "deep": {"app": {"net": state}},
    }.items():
        dcp.save(tree, checkpoint_id=tmp_path / name, no_dist=True)
        out = tmp_path / f"out of {name}"
        if name == "deep":
            assert "--prefix" in run("export", tmp_path / name, out, expected=2).stderr
            run("export", tmp_path / name, out, "--prefix", "app.net.")
        else:
            run("export", tmp_path / name, out)
        assert_equal(load_file(out / "model.safetensors"), state)


# import


def test_what_was_exported_is_imported_again(made, tmp_path):
    for name, size in {"one": "5GB", "many": "60"}.items():
        run("export", made / "first", tmp_path / name, "--max-shard-bytes", size)
        run("import", tmp_path / name, tmp_path / f"{name} again", "--files", 2)
        assert read_manifest(tmp_path / f"{name} again").selection == "model only"
        model, _ = trainable()
        load(tmp_path / f"{name} again", model)
        assert_equal(model.state_dict(), with_ties(model_of(made / "first")))
    run("verify", tmp_path / "many again")
    run("diff", tmp_path / "one again", tmp_path / "many again")
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True]), "c": torch.ones(())}
    save_file(state, tmp_path / "any.safetensors")
    run("import", tmp_path / "any.safetensors", tmp_path / "out")
    assert_equal(model_of(tmp_path / "out"), state)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_imported_with_its_ties_under_clean_names(tmp_path, is_zip):
    model, _ = trainable()
    state = {f"_orig_mod.{name}": values for name, values in model.state_dict().items()}
    state["_orig_mod.turned"] = torch.arange(6.0).view(2, 3).t()
    torch.save({"net": state, "epoch": 3}, tmp_path / "m.pt", _use_new_zipfile_serialization=is_zip)
    refused = run("import", tmp_path / "m.pt", tmp_path / "out", expected=2)
    assert "epoch (int)" in refused.stderr
    assert "--key" in refused.stderr
    assert (
        "net, epoch"
        in run("import", tmp_path / "m.pt", tmp_path / "out", "--key", "x", expected=2).stderr
    )
    run("import", tmp_path / "m.pt", tmp_path / "out", "--key", "net")
    assert read_manifest(tmp_path / "out").aliases == {"again.weight": "inner.weight"}
    expected = {**model.state_dict(), "turned": torch.arange(6.0).view(2, 3).t()}
    assert_equal(with_ties(model_of(tmp_path / "out")), expected)
    torch.save({"a.w": torch.ones(1), "a._orig_mod.w": torch.zeros(1)}, tmp_path / "m.pt")
    refused = run("import", tmp_path / "m.pt", tmp_path / "two", expected=2)
    assert "a.w and a._orig_mod.w" in refused.stderr  # names that would fall together
    assert not (tmp_path / "two").exists()


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


def test_a_file_that_would_run_something_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, tmp_path / "m.pt")
    buffer = io.BytesIO()
    pickle.dump({"a": Malicious()}, buffer)
    (tmp_path / "p.pt").write_bytes(buffer.getvalue())
    (tmp_path / "cut.pt").write_bytes((tmp_path / "m.pt").read_bytes()[:-30])
    for name in ("m.pt", "p.pt", "cut.pt"):
        refused = run("import", name, "out", expected=2)
        assert f"{name} cannot be read without running code" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pt", "m.pt", "p.pt"]


# The command itself


def test_what_cannot_be_done_is_one_line_and_exit_code_2(made, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years")
    for args in (
        ("info", tmp_path / "nothing"),
        ("verify", tmp_path / "nothing"),
        ("diff", made / "first", tmp_path / "nothing"),
        ("info", made / "first" / "manifest.json"),
        ("reshard", made / "first", tmp_path / "taken", "--files", 2),
        ("export", made / "first", tmp_path / "x.safetensors"),
        ("export", made / "first", tmp_path / "x", "--prefix", "module."),
        ("import", tmp_path / "nothing", tmp_path / "out"),
        ("import", made / "first", tmp_path / "out"),
    ):
        result = run(*args, expected=2)
        (line,) = result.stderr.splitlines()
        assert line.startswith("fullshard: ")
        assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("command", ["info", "verify", "diff", "reshard", "export", "import"])
def test_every_command_explains_itself(command):
    shown = run(command, "--help").stdout
    assert shown.startswith(f"Usage: fullshard checkpoint {command} [OPTIONS] ")
    for parameter in fullshard.commands["checkpoint"].commands[command].params:
        described = parameter.make_metavar if parameter.param_type_name == "argument" else None
        assert (parameter.opts[0].upper() if described else parameter.opts[0]) in shown
    short = fullshard.commands["checkpoint"].commands[command].short_help
    assert short in run("--help").stdout


# As it is installed; started in a process of its own.
COMMAND = Path(sys.executable).with_name("fullshard")


@pytest.mark.soak
def test_on_a_terminal_there_is_a_bar(saved):
    (saved / "first" / "rank_00001.pt").unlink()
    shown, returncode = on_terminal("checkpoint", "verify", saved / "first")
    assert "━" in shown
    assert "verifying: " not in shown
    assert "rank_00001.pt: " in shown
    assert returncode == 1


def on_terminal(*args: Any) -> tuple[str, int]:
    """What the installed command shows on a terminal, and its exit code."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(its)
    content = b""
    try:
        while part := os.read(ours, 4096):
            content += part
    except OSError:
        pass  # Linux says so when the other end is closed
    os.close(ours)
    return content.decode(), process.wait()


def test_on_a_terminal_a_table_is_not_wider_than_it(made):
    hooks = CliRunner(env={"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "70"})
    result = hooks.invoke(fullshard, ["checkpoint", "info", str(made / "first")])
    table = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).split("\n\n")[0]
    assert "model.inner.weight" in table
    assert max(len(line) for line in table.splitlines()) == 70


@pytest.mark.exhaustive
def test_the_library_needs_no_extra_and_no_command_holds_more_than_a_few_tensors(tmp_path):
    """On 32 tensors, 2 MB each: 64 MB. In its own process, which starts without what it needs."""
    program = """
        import os, resource, sys, torch
        from pathlib import Path
        import fullshard, fullshard_train.report, fullshard.state
        from fullshard.state.checkpoint.save import write_checkpoint
        from fullshard.state.stored import TensorSource
        extras = {"click", "rich", "jinja2"}
        assert not extras & {name.split(".")[0] for name in sys.modules}
        from fullshard.cli.main import main
        sys.modules["click"] = None
        try:
            main()
        except SystemExit as end:
            assert end.code == 2
        del sys.modules["click"]
        from fullshard.cli.commands import fullshard

        os.chdir(sys.argv[1])
        def peak_mb():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        for name in ("a", "b"):
            read = lambda where: torch.full(where.sizes, float(ord(name)))
            tensor = TensorSource((1024, 512), torch.float32, (), read)
            tensors = {f"model.{i}": tensor for i in range(32)}
            write_checkpoint(Path(name), tensors, num_files=3)
        before = peak_mb()
        for line in (
            "reshard a again --files 2", "verify again", "diff a again", "diff a b",
            "export a out --dtype bfloat16", "import out back",
        ):
            command, *args = line.split()
            try:
                fullshard(["checkpoint", command, *args])
            except SystemExit as end:
                assert end.code == (1 if line == "diff a b" else 0), line
            print("grown", command, peak_mb() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        text=True,
        capture_output=True,
        check=False,
        # Freed blocks go back at once, so that peaks of memory are of what is in use.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.returncode == 0, done.stderr
    assert (
        "click is not installed; run: pip install 'fullshard[cli]'" in done.stderr.splitlines()[0]
    )
    grown = [float(line.split()[2]) for line in done.stdout.splitlines() if line[:5] == "grown"]
    assert len(grown) == 6
    assert max(grown) < 32
