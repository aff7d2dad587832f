"""`fullshard tokenize`: the tokenizer and the tokens of a run, before there is one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from fullshard.console import progress, say
from fullshard.errors import ConfigError
from fullshard_train.cli.train import KeyCommand, given_options
from fullshard_train.config import KEYS, validate
from fullshard_train.config_file import config_of


class _TokenizeCommand(KeyCommand):
    keys = tuple(
        key
        for (section, name), key in KEYS.items()
        if (section, name) == ("model", "name") or (section == "data" and name != "eval_share")
    )


@click.command(cls=_TokenizeCommand, short_help="Tokenize text ahead of a run.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new folder for the tokenizer, in Hugging Face's layout.",
)
@click.pass_context
def tokenize(ctx: click.Context, /, out: Path | None, **_: Any) -> None:
    """Train the tokenizer if it is to be trained, and write the tokens of --data into the cache.

    `fullshard train` with the same --data, --model and --tokenizer then begins at once.
    """
    config = config_of(None, given_options(ctx))
    validate(config)
    # Imported here, because printing help does not need it.
    from fullshard_train.corpus import tokenize_all
    from fullshard_train.models.tokenizers import FolderTokenizer
    from fullshard_train.run_tokenizer import cache_folder, tokenizer_for, write_tokenizer
    from fullshard_train.same_run import Inputs

    if out is not None and out.exists():
        raise ConfigError(f"--out: {out} exists; pass a new folder for the tokenizer.")
    inputs, cache = Inputs.of(config), cache_folder(config)
    kind, sources = inputs.tokenizer_kind, inputs.sources
    own = tokenizer_for(kind, inputs.tokenizer, sources, cache, say)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        folder = out or Path(scratch) / "tokenizer"
        write_tokenizer(own, kind, folder)
        if out is not None:
            say(f"tokenizer  {out}")
        kept = folder if isinstance(own, FolderTokenizer) else folder / "tokenizer.json"
        path = "bytes" if kind == "bytes" else str(kept)
        documents = [each.documents for each in (*sources, *(inputs.eval_sources or ()))]
        with progress("tokenizing") as report:
            vocabulary = inputs.architecture.vocabulary
            found = tokenize_all(documents, own, path, cache / "tokens", vocabulary, report)
    size = sum(each.num_bytes for each in documents)
    number = sum(each.num_tokens for each in found)
    say(f"tokens     {number:,} of {size:,} bytes, {size / max(number, 1):.2f} bytes each")
    if unreadable := [each.unreadable for each in found if each.unreadable]:
        text = f"data: {len(unreadable)} of {len(found)} pieces cannot be read ({unreadable[0]})"
        if config.data.strict_data:
            raise ConfigError(f"{text}; repair the files.")
        say(text)
