"""From files of text to tokens in a file."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import ConfigError
from fullshard_train import tokenization
from fullshard_train.batches import Batches
from fullshard_train.corpus import Corpus, Shard, prepare_corpus
from fullshard_train.models.tokenizers import ByteTokenizer
from fullshard_train.sources import Documents

END = ByteTokenizer.end


class WideTokenizer(ByteTokenizer):
    """Has more tokens than fit into two bytes."""

    vocabulary = 70_000
    end = 69_999

    def encode(self, text: str) -> list[int]:
        return [1000 + byte for byte in text.encode()]

    @property
    def fingerprint(self) -> str:
        return "wide"


def texts(*paths: Path, text_field: str = "text") -> list[str]:
    return list(Documents.of([str(path) for path in paths], text_field))


def fingerprint(*paths: Path, text_field: str = "text") -> str:
    return Documents.of([str(path) for path in paths], text_field).fingerprint


def prepared(paths: list[Path], folder: Path, tokenizer=None, vocabulary: int = 257) -> Corpus:
    documents = Documents.of([str(path) for path in paths], "text")
    corpus = prepare_corpus(documents, tokenizer or ByteTokenizer(), folder, vocabulary=vocabulary)
    corpus.folder.clean()
    return corpus


def tokens_of(corpus: Corpus) -> torch.Tensor:
    """The tokens of a corpus of one piece."""
    (shard,) = corpus.window(0, 1).shards
    return shard.tokens


def batches_of(*corpora: Corpus, sequence: int, **options) -> Batches:
    whole = {"batch": 1, "rank": 0, "num_ranks": 1, "seed": 0}
    return Batches(corpora, sequence=sequence, **{**whole, **options})


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Documents


def test_a_text_file_is_one_document_and_each_line_of_a_jsonl_file_is_one(tmp_path):
    write(tmp_path / "b.txt", "one\ntwo\r\n")
    lines = [json.dumps({"text": text, "id": 1}) for text in ("three", "", "four\nfive")]
    write(tmp_path / "a.jsonl", "\n".join([*lines, "", ""]))
    assert texts(tmp_path / "b.txt", tmp_path / "a.jsonl") == [
        "three",
        "four\nfive",
        "one\ntwo\r\n",
    ]
    # A byte order mark is not text, and a file that is given twice is read once.
    marked = write(tmp_path / "c" / "a.txt", b"\xef\xbb\xbfhello")
    assert texts(marked, marked.parent, marked) == ["hello"]
    assert texts(write(tmp_path / "d.jsonl", b'\xef\xbb\xbf{"text": "hello"}')) == ["hello"]
    # A character may lie across the end of the part that is looked at first.
    write(tmp_path / "e" / "a.txt", "x" * (2**20 - 1) + "\xe9" * 3)
    assert texts(tmp_path / "e")[0][-3:] == "\xe9\xe9\xe9"


def test_a_folder_is_walked_in_order_without_hidden_and_other_files(tmp_path):
    root = tmp_path / "root"
    for name in ("b/x.txt", "a/z.py", "a/b.md", "c.txt"):
        write(root / name, name)
    write(root / ".hidden/x.txt", "hidden")
    write(root / ".x.txt", "hidden")
    write(root / "empty.txt", "")
    write(root / "latin.txt", "caf\xe9".encode("latin-1"))
    write(root / "image.bin", b"PNG\0\1\2")
    (root / "broken").symlink_to(root / "nowhere")
    documents = Documents.of([str(root)], "text")
    assert list(documents) == ["a/b.md", "a/z.py", "b/x.txt", "c.txt"]
    assert documents.num_bytes == sum(
        len(name) for name in ("b/x.txt", "a/z.py", "a/b.md", "c.txt")
    )
    assert documents.files[0].name == "root/a/b.md"


def test_without_paths_the_source_of_the_standard_library_is_read():
    documents = Documents.of([], "text")
    names = {file.name for file in documents.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idle_test"}
    assert documents.num_bytes > 5_000_000
    assert next(iter(documents)).strip()


def test_a_fingerprint_depends_on_content_and_names_and_not_on_place_or_time(tmp_path):
    first = write(tmp_path / "one/data/a.txt", "hello")
    second = write(tmp_path / "two/data/a.txt", "hello")
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first.parent) == fingerprint(second.parent)
    before = fingerprint(first)
    write(first, "hellO")
    assert fingerprint(first) != before
    assert fingerprint(second.rename(second.with_name("b.txt"))) != before
    lines = write(tmp_path / "a.jsonl", '{"text": "a", "body": "b"}')
    assert fingerprint(lines) != fingerprint(lines, text_field="body")


def test_a_large_input_is_told_apart_by_the_ends_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard_train.sources.HASHED_BYTES", 10)
    path = write(tmp_path / "a.txt", "x" * 5_000_000)
    before = fingerprint(path)
    write(path, "x" * 4_999_999 + "y")
    assert fingerprint(path) != before


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.txt", None, "does not exist; correct the path"),
        ("empty.txt", "", "is empty"),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text"),
        ("zeros.bin", b"a\0b", "is not UTF-8 text"),
    ],
)
def test_a_named_file_that_cannot_be_read_as_text_is_an_error(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=words) as found:
        texts(path)
    assert str(path) in str(found.value)


def test_a_path_without_text_is_an_error_that_names_what_is_there(tmp_path):
    with pytest.raises(ConfigError, match="contains no file"):
        texts(tmp_path)
    write(tmp_path / "x.bin", b"\0")
    with pytest.raises(ConfigError, match=r"only files that are not \(1\)"):
        texts(tmp_path)
    write(tmp_path / "corpus.txt", "text")
    with pytest.raises(ConfigError, match=r"did you mean .*corpus\.txt"):
        texts(tmp_path / "corpsu.txt")
    with pytest.raises(ConfigError, match="there is no folder"):
        texts(tmp_path / "nowhere" / "corpus.txt")
    with pytest.raises(ConfigError, match="see the byte at 1048576"):
        texts(write(tmp_path / "a.txt", b"x" * 2**20 + b"\xff"))


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"text": ', "is not valid JSON"),
        ('["text"]', "is a list, not a JSON object"),
        ('{"body": "x", "id": 3}', "has the fields 'body', 'id'"),
        ("{}", "has the fields none"),
        ('{"text": 3}', "is not text but int"),
        (b'{"text": "\xe9"}', "is not valid JSON"),
    ],
)
def test_a_broken_line_is_an_error_that_names_it(tmp_path, line, words):
    content = line if isinstance(line, bytes) else line.encode()
    # Far from the beginning, which is looked at before.
    good = b'{"text": "%s"}\n' % (b"x" * 2**20)
    path = write(tmp_path / "a.jsonl", good * 2 + content)
    with pytest.raises(ConfigError, match=words) as found:
        texts(path)
    assert str(found.value).startswith(f"{path}, line 3: ")


# Corpus


def test_documents_lie_one_after_another_each_followed_by_its_end(tmp_path):
    first, second = write(tmp_path / "a.txt", "ab"), write(tmp_path / "b.txt", "c")
    corpus = prepared([first, second], tmp_path / "tokens")
    assert tokens_of(corpus).tolist() == [97, 98, END, 99, END]
    assert tokens_of(corpus).dtype is torch.uint16
    # Tokens of another tokenizer have a file of their own, with as many bytes as they need.
    wide = prepared([first, second], tmp_path / "tokens", WideTokenizer(), 70_000)
    assert tokens_of(wide).tolist() == [1097, 1098, 69_999, 1099, 69_999]
    assert tokens_of(wide).dtype is torch.int32
    assert wide.fingerprint != corpus.fingerprint


def test_rows_share_one_token_so_that_each_is_predicted_once(tmp_path):
    shard = Shard(tokens_of(prepared([write(tmp_path / "a.txt", "abcdef")], tmp_path)))
    assert shard.tokens.numel() == 7
    assert shard.num_sequences(3) == 2
    assert shard.row(0, 3).tolist() == [97, 98, 99, 100]
    assert shard.row(1, 3).tolist() == [100, 101, 102, END]
    assert shard.row(0, 3).dtype is torch.int64


def test_tokens_are_written_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "hello")
    first = tokens_of(prepared([path], tmp_path / "t"))
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: pytest.fail("encoded again"))
    again = tokens_of(prepared([path], tmp_path / "t"))
    assert again.tolist() == first.tolist()
    assert len(list((tmp_path / "t").glob("*/*"))) == 2


@pytest.mark.parametrize("damage", ["cut short", "no sizes", "broken sizes", "gone", "old sizes"])
def test_a_damaged_file_of_tokens_is_written_anew(tmp_path, damage):
    path, folder = write(tmp_path / "a.txt", "hello"), tmp_path / "t"
    expected = tokens_of(prepared([path], folder)).tolist()
    (tokens,), (sizes,) = folder.glob("*/*.bin"), folder.glob("*/*.json")
    if damage == "cut short":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif damage == "no sizes":
        sizes.unlink()
    elif damage == "broken sizes":
        sizes.write_text('{"num_tokens"')
    elif damage == "old sizes":
        sizes.write_text('{"tokens": 3}')
    else:
        tokens.unlink()
    assert tokens_of(prepared([path], folder)).tolist() == expected
    assert tokens.stat().st_size == 2 * len(expected)


def test_a_corpus_that_cannot_be_made_is_an_error_that_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "hello")
    corpus = prepared([path], tmp_path / "t")
    batches_of(corpus, sequence=5).begin()
    with pytest.raises(ConfigError, match=r"6 tokens are too few to fill a sequence of 6"):
        batches_of(corpus, sequence=6).begin()
    with pytest.raises(ConfigError, match="bytes of text cannot be written"):
        prepared([path], path / "tokens")
    with pytest.raises(ConfigError, match="largest token is 256"):
        tokens_of(prepared([path], tmp_path / "t", vocabulary=256))
    broken = write(tmp_path / "a.jsonl", '{"text": "good"}\n{"text": 3}')
    with pytest.raises(ConfigError, match="line 2"):
        tokens_of(prepared([broken], tmp_path / "none"))
    assert [each.suffix for each in (tmp_path / "none").glob("*/*")] == [".error"]
    write(broken, '{"text": "good"}')
    assert tokens_of(prepared([broken], tmp_path / "none")).tolist() == [*b"good", END]
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [3, 257])
    with pytest.raises(ConfigError, match="tokens are from 3 to 257"):
        tokens_of(prepared([write(tmp_path / "b.txt", "other")], tmp_path / "t"))


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("ab\n"), min_size=1), num_chars=st.integers(1, 5))
def test_a_text_in_pieces_has_the_same_tokens(tmp_path_factory, text, num_chars):
    folder = tmp_path_factory.mktemp("pieces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "PIECE_CHARS", num_chars)
        corpus = prepared([write(folder / "a.txt", text)], folder)
        tokens_of(corpus)
    assert tokens_of(corpus).tolist() == [*text.encode(), END]


# Conversations


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS: list[tuple[dict[str, object], str]] = [
    # A line, and what is trained of it.
    (
        {
            "messages": [
                said("system", "Be brief."),
                said("user", "1 + 1?"),
                said("assistant", "2"),
                said("user", "And 2 + 2?"),
                said("assistant", "4, é"),
                said("user", "Thanks."),
            ]
        },
        "2\n4, é\n",
    ),
    ({"prompt": "Once ", "completion": "upon a time"}, "upon a time"),
    ({"text": "plain", "messages": 3}, "lain"),  # nothing foretells what a document begins with
]


def test_of_conversations_only_what_the_assistant_says_is_trained(tmp_path):
    lines = write(tmp_path / "chats.jsonl", "\n".join(json.dumps(line) for line, _ in CHATS))
    corpus = prepared([lines], tmp_path / "tokens")
    length = tokens_of(corpus).numel() - 1
    batches = batches_of(corpus, sequence=length)
    inputs, targets, positions = (each[0] for each in batches.next())
    trained = targets[targets != -100]
    assert ByteTokenizer().decode(trained.tolist()) == "".join(text for _, text in CHATS)
    assert (trained == END).sum() == len(CHATS)
    text = ByteTokenizer().decode(inputs.tolist())
    assert text.startswith("<|system|>\nBe brief.\n<|user|>\n1 + 1?\n<|assistant|>\n2\n<|user|>")
    assert "Thanks" not in text
    # Positions begin again with each document, after the token that ends the one before.
    starts = [0, *(inputs == END).nonzero().flatten().add(1).tolist()]
    assert len(starts) == len(CHATS)
    assert (positions == 0).nonzero().flatten().tolist() == starts
    assert positions.max() + 1 == max(
        b - a for a, b in zip(starts, [*starts[1:], length], strict=True)
    )
    # Texts alone are packed as ever.
    plain = write(tmp_path / "plain.jsonl", json.dumps({"text": "plain"}))
    assert not prepared([plain], tmp_path / "tokens").has_chats


def test_masked_documents_have_positions_of_their_own_and_predict_no_other(tmp_path):
    for name in ("abc", "defg"):
        write(tmp_path / f"{name}.txt", name)
    corpus = prepared([tmp_path / "abc.txt", tmp_path / "defg.txt"], tmp_path / "tokens")
    inputs, targets, positions = batches_of(corpus, sequence=8, end=END).next()
    assert inputs.tolist() == [[*b"abc", END, *b"defg"]]
    assert targets.tolist() == [[*b"bc", END, -100, *b"efg", END]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    plain, all_targets = batches_of(corpus, sequence=8).next()
    assert torch.equal(plain, inputs)
    assert all_targets[0, 3] == ord("d")


@pytest.mark.parametrize(
    "lines, words",
    [
        ([{"messages": [said("user", "hi")]}], "at least one of the role 'assistant'"),
        ([{"messages": [{"role": "assistant"}]}], "'role' and 'content' as text"),
        ([{"messages": "hi"}], "'role' and 'content' as text"),
        ([{"prompt": "a", "completion": [said("assistant", "b")]}], "no text in 'prompt'"),
        ([{"chat": "hi"}], "no 'messages', and no text in 'prompt' and 'completion'"),
        (
            [{"text": "a"}, {"prompt": "b", "completion": "c"}],
            "has text before its first conversation",
        ),
    ],
)
def test_a_conversation_that_cannot_be_read_is_an_error(tmp_path, lines, words):
    path = write(tmp_path / "chats.jsonl", "\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match=words):
        tokens_of(prepared([path], tmp_path / "tokens"))
