"""The commands of the application, which `fullshard` offers beside those of the library."""

from fullshard_train.cli.generate import generate
from fullshard_train.cli.plan import plan
from fullshard_train.cli.report import report
from fullshard_train.cli.tokenize import tokenize
from fullshard_train.cli.train import train

COMMANDS = (train, plan, tokenize, generate, report)
