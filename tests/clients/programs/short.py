"""Some cases of the frameworks in the developers' environment, on both libraries.

One start for both, since importing the frameworks takes most of the time.
"""

import sys
from pathlib import Path

import accelerate_fsdp
import cases
import transformers_trainer

from fullshard import dropin

if __name__ == "__main__":
    every = transformers_trainer.ALL | accelerate_fsdp.ALL
    cases.run(every, Path(sys.argv[1], "torch"))
    dropin.install()
    cases.run(every, Path(sys.argv[1], "fullshard"))
