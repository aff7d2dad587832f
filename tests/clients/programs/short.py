"""Some cases of the frameworks that are in the environment of developers."""

import accelerate_fsdp
import cases
import transformers_trainer

if __name__ == "__main__":
    cases.run(transformers_trainer.ALL | accelerate_fsdp.ALL)
