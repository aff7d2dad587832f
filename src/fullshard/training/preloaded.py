"""What a rank needs, loaded once by the process that ranks are forked from."""

import gc

import torch

from fullshard.training import launcher as launcher
from fullshard.training import run as run

torch.optim.AdamW([torch.zeros(1)])  # the first optimizer loads many modules
gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it visits
