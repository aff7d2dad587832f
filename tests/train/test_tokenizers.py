"""Tokenizers of files and trained ones: the same for the same data, kept with a run, compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.cli.commands import fullshard
from fullshard.errors import CheckpointError, ConfigError, FullshardError
from fullshard.testing import Rank, on_ranks
from fullshard_train.control import StopRequest
from fullshard_train.generation import GenerateRequest, find_checkpoint, launch_generation
from fullshard_train.models import architecture_of
from fullshard_train.models.bpe import trained_bpe
from fullshard_train.models.tokenizers import END, ByteTokenizer, JsonTokenizer, tokenizer_at
from fullshard_train.output import RunFolder
from fullshard_train.run import Run
from fullshard_train.run_tokenizer import tokenizer_of_run
from fullshard_train.world import World
from tests.support.tiny_run import TEXT, configured, losses

TEXTS = [TEXT[:5000], "def f(x):\n    return x  # é\n" * 50]


def trained(cache: Path, vocabulary: int = 400, name: str = "texts") -> JsonTokenizer:
    return trained_bpe(iter(TEXTS), vocabulary, name, cache, is_shown=False)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    return trained(tmp_path_factory.mktemp("cache"))


@settings(max_examples=50)
@given(text=st.text())
def test_a_trained_bpe_gives_any_text_back(bpe: JsonTokenizer, text: str) -> None:
    tokens = bpe.encode(text)
    assert bpe.end not in tokens
    assert bpe.decode([*tokens, bpe.end]) == text


def test_a_trained_bpe_follows_from_its_texts_and_is_trained_once(
    bpe: JsonTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bpe.vocabulary == 400
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    again = trained(tmp_path)
    assert again.fingerprint == bpe.fingerprint
    assert trained(tmp_path, 300).fingerprint != bpe.fingerprint
    # From now on nothing can be trained, so what is found is what was trained.
    monkeypatch.setattr("tokenizers.trainers.BpeTrainer", None)
    assert trained(tmp_path).fingerprint == bpe.fingerprint
    with pytest.raises(TypeError):
        trained(tmp_path, name="other texts")
    # What looks like the end of a text is text.
    assert bpe.end not in bpe.encode(f"a{END}b")
    assert bpe.decode(bpe.encode("a\ud800b")) == "a?b"


def test_a_space_at_the_end_of_a_prompt_is_left_to_the_model(bpe: JsonTokenizer) -> None:
    prompt, expected = "def ", "f(x)"
    tokens = bpe.encode_prompt(prompt)
    added = bpe.encode(prompt + expected)
    assert added[: len(tokens)] == tokens  # what the model has seen in training
    assert bpe.decode_after(prompt, added[len(tokens) :]) == expected
    assert bpe.decode_after("def", added[len(tokens) :]) == f" {expected}"
    assert bpe.encode_prompt(" ") == bpe.encode(" ")
    assert ByteTokenizer().encode_prompt(prompt) == list(prompt.encode())


def test_a_text_that_does_not_repeat_yields_fewer_tokens(tmp_path: Path) -> None:
    own = trained_bpe(iter(["abcdefg"]), 1000, "short", tmp_path, is_shown=False)
    assert 257 <= own.vocabulary < 270


def test_a_saved_bpe_opens_in_transformers(bpe: JsonTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    own = tokenizer_at(tmp_path)
    assert own.encode(TEXTS[1]) == bpe.encode(TEXTS[1])
    assert own.end == bpe.end
    assert tokenizer_at(tmp_path / "tokenizer.json").fingerprint == bpe.fingerprint
    said = [{"role": "user", "content": "hello"}]
    assert own.render(said, is_prompt=True) == bpe.render(said, is_prompt=True)


def test_the_vocabulary_of_a_built_in_size_follows_its_tokenizer(
    bpe: JsonTokenizer, tmp_path: Path
) -> None:
    bpe.save(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    assert architecture_of("tiny").vocabulary == 264
    assert architecture_of("tiny", tokenizer=path).vocabulary == 400
    assert architecture_of("tiny", tokenizer="bpe:1001").vocabulary == 1008
    assert architecture_of("150m", tokenizer="bytes").vocabulary == 264
    assert architecture_of("150m").tokenizer_kind("auto") == "bpe:32000"
    assert architecture_of("8b").tokenizer_kind("auto") == "bpe:128256"
    assert architecture_of("8b").vocabulary == 128_256
    assert architecture_of("tiny", tokenizer=path).tokenizer(path).vocabulary == 400
    with pytest.raises(ConfigError, match="vocabulary of 264 is too small for the tokenizer"):
        architecture_of("tiny").tokenizer(path)


def test_files_that_are_no_tokenizer_are_refused_in_a_sentence(
    bpe: JsonTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"byte does not exist; pass a tokenizer.json, the"):
        tokenizer_at(Path("byte"))
    with pytest.raises(ConfigError, match="has no tokenizer files"):
        tokenizer_at(tmp_path)
    bpe.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = path.read_text()
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer_at(path).end == bpe.end  # by its usual name
    path.write_text(content.replace(END, "<finis>"))
    with pytest.raises(ConfigError, match="no token that ends a text; name it as eos_token"):
        tokenizer_at(path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<finis>"}}')
    assert tokenizer_at(path).end == bpe.end
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not a tokenizer that the library tokenizers"):
        tokenizer_at(path)


# Runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def trains(rank: Rank, folder: Path, out: str, **changes: Any) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    data = {"paths": (str(folder / "text.txt"),), **changes.pop("data", {})}
    with StopRequest() as stop:
        Run(configured(folder, out, data=data, **changes), world).run(stop)


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_run_keeps_its_tokenizer_and_continues_with_no_other(rank: Rank, folder: Path) -> None:
    bpe, steady = {"tokenizer": "bpe:320"}, {"schedule": "constant"}
    more: dict[str, Any] = {"run": {"resume": True}, "optimizer": {"steps": 6, **steady}}
    trains(rank, folder, "run", data=bpe, optimizer={"steps": 3, **steady})
    trains(rank, folder, "run", data=bpe, **more)
    trains(rank, folder, "whole", data=bpe, optimizer={"steps": 6, **steady})
    path = str(folder / "run" / "tokenizer" / "tokenizer.json")
    if rank.rank == 0:
        assert losses(folder / "run") == losses(folder / "whole")
        assert RunFolder(folder / "run").kept_tokenizer == Path(path)
        assert tokenizer_at(Path(path)).vocabulary == 320
    # A file of the same content is the same tokenizer, wherever it is.
    more["optimizer"]["steps"] = 7
    trains(rank, folder, "run", data={"tokenizer": path}, **more)
    for other in ("bpe:384", "bytes"):
        with pytest.raises(FullshardError, match="trained with another tokenizer") as caught:
            trains(rank, folder, "run", data={"tokenizer": other}, **more)
        assert "pass the same --tokenizer and --data, or another --out" in str(caught.value)


@on_ranks(1)
def test_a_checkpoint_with_another_tokenizer_is_refused(rank: Rank, folder: Path) -> None:
    trained(folder / "given").save(folder)
    given = folder / "tokenizer.json"
    trains(rank, folder, "run", data={"tokenizer": str(given)}, optimizer={"steps": 1})
    given.unlink()  # the run has its own
    _, config = find_checkpoint(folder / "run")
    architecture = architecture_of("tiny", tokenizer=config.data.tokenizer)
    own = tokenizer_of_run(architecture, config, folder / "run")
    assert own.fingerprint == trained(folder / "given").fingerprint
    with pytest.raises(CheckpointError, match="is not the one that the checkpoint was trained"):
        tokenizer_of_run(architecture, config, folder / "run", "another")


@pytest.mark.exhaustive
def test_a_trained_tokenizer_is_used_by_generate_and_exported(folder: Path, tmp_path: Path) -> None:
    def command(*args: object) -> str:
        result = CliRunner().invoke(fullshard, [str(each) for each in args])
        assert result.exit_code == 0, result.output
        return result.output

    out = tmp_path / "tokenizer"
    kind = ("--tokenizer", "bpe:300", "--data", folder / "text.txt")
    said = command("tokenize", "--model", "tiny", *kind, "--out", out)
    assert "a BPE of 300 tokens, trained on" in said
    assert "bytes each" in said
    own = tokenizer_at(out / "tokenizer.json")
    run = ("--steps", 2, "--sequence", 32, "--ranks", 1, "--device", "cpu", "--sample-tokens", 0)
    command("train", "--model", "tiny", *kind, *run, "--no-report", "--out", tmp_path / "run")
    request = GenerateRequest(checkpoint=tmp_path / "run", prompt="line", tokens=5, device="cpu")
    assert isinstance(launch_generation(request), str)
    command("checkpoint", "export", tmp_path / "run", tmp_path / "exported")
    exported = tmp_path / "exported"
    assert tokenizer_at(exported / "tokenizer.json").fingerprint == own.fingerprint
    config = json.loads((exported / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (304, own.end)
    # Another tokenizer in the place of the one that was trained is noticed.
    trained(tmp_path / "other", 290).save(tmp_path / "run" / "tokenizer")
    with pytest.raises(CheckpointError, match="not the one that the checkpoint was trained with"):
        launch_generation(request)
