"""`fullshard generate`: text from the checkpoint of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fullshard.cli.screen import printable
from fullshard.training.config import DEVICES


@click.command(short_help="Text from the checkpoint of a run.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="What the text begins with; - reads standard input.")
@click.option("--tokens", default=160, show_default=True, help="How many, unless it ends before.")
@click.option(
    "--temperature",
    default=0.7,
    show_default=True,
    help="How freely tokens are drawn; 0 takes the likeliest.",
)
@click.option("--top-k", default=40, show_default=True, help="Draw from the likeliest; 0: all.")
@click.option("--seed", default=0, show_default=True, help="The same seed draws the same text.")
@click.option("--ranks", default=1, show_default=True, help="Processes to shard the model over.")
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
def generate(
    checkpoint: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    ranks: int,
    device: str,
) -> None:
    """Print text that follows a prompt, from the model of CHECKPOINT.

    CHECKPOINT is the folder of a run, that of its checkpoints, or one of these; of several the
    newest is taken. It may have been written on any number of ranks.
    """
    # Imported here: the help of all commands needs none of it.
    from fullshard.training.generating import GenerateRequest, launch_generation

    request = GenerateRequest(
        checkpoint=checkpoint,
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        ranks=ranks,
        device=device,
    )
    text = request.prompt + launch_generation(request)
    # A model may say anything, also what a terminal would obey.
    click.echo("".join(each if each in "\n\t" else printable(each) for each in text))
