"""`fullshard generate`: text from the checkpoint of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from fullshard.console import printable
from fullshard_train.config import DEVICES


@click.command(short_help="Generate text from the checkpoint of a run.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The beginning of the text; - reads standard input.")
@click.option("--tokens", default=160, show_default=True, help="The most tokens to generate.")
@click.option(
    "--temperature",
    default=0.7,
    show_default=True,
    help="The sampling temperature; 0 chooses the most likely token.",
)
@click.option(
    "--top-k", default=40, show_default=True, help="Sample from the k most likely tokens; 0: all."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same text.")
@click.option("--ranks", default=1, show_default=True, help="Processes to shard the model over.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
def generate(prompt: str, **options: Any) -> None:
    """Print text that follows a prompt, from the model of CHECKPOINT.

    CHECKPOINT is the folder of a run, the folder of its checkpoints, or one of them; the newest is
    used. It may have been written on any number of ranks.
    """
    # Imported here, because printing help does not need it.
    from fullshard_train.generation import GenerateRequest, launch_generation

    prompt = sys.stdin.read() if prompt == "-" else prompt
    text = prompt + launch_generation(GenerateRequest(prompt=prompt, **options))
    # A model may generate characters that control the terminal.
    click.echo("".join(each if each in "\n\t" else printable(each) for each in text))
