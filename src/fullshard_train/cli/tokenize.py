"""`fullshard tokenize`: the tokenizer and the tokens of a run, before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fullshard.console import say
from fullshard.errors import ConfigError
from fullshard_train.cli.train import KeyCommand, given_options
from fullshard_train.config import KEYS, validate
from fullshard_train.config_file import config_of


class _TokenizeCommand(KeyCommand):
    keys = tuple(
        key
        for (section, name), key in KEYS.items()
        if (section, name) == ("model", "name")
        or (section == "data" and name not in ("eval_paths", "eval_share"))
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
    from fullshard_train.corpus import prepare_corpus
    from fullshard_train.run_tokenizer import cache_folder, tokenizer_for, write_tokenizer
    from fullshard_train.same_run import Inputs

    if out is not None and out.exists():
        raise ConfigError(f"--out: {out} exists; pass a new folder for the tokenizer.")
    inputs, cache = Inputs.of(config), cache_folder(config)
    documents, vocabulary = inputs.documents, inputs.architecture.vocabulary
    own = tokenizer_for(inputs.tokenizer_kind, inputs.tokenizer, documents, cache, say)
    if out is not None:
        write_tokenizer(own, inputs.tokenizer_kind, out)
        say(f"tokenizer  {out}")
    corpus = prepare_corpus(documents, own, cache / "tokens", sequence=1, vocabulary=vocabulary)
    number, size = corpus.num_tokens, documents.num_bytes
    say(f"tokens     {number:,} of {size:,} bytes, {size / number:.2f} bytes each; in {cache}")
