"""How far the logits of an exported model, as transformers reads it, are from the run's own.

    python -m tests.support.logits RUN EXPORTED

Both are folders; prints the largest difference of a logit.
"""

import sys
import warnings
from pathlib import Path

import torch
import transformers

from murmuration.worker.config import parse_config, task_of
from murmuration.worker.manifest import Manifest
from murmuration.worker.training.export import anchored_model, find_checkpoint


def main() -> None:
    """On tokens that are drawn."""
    run, exported = sys.argv[1:]
    saved = find_checkpoint(Path(run))
    config = parse_config(Manifest(saved.values["manifest"]).sections, "the run")
    ours = anchored_model(saved, config, task_of(config)).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    named = {"input_ids": tokens}
    with torch.inference_mode():
        logits = theirs(**named).logits
        mine = ours(**named).logits if config.task.name == "huggingface" else ours(tokens)
    print(float((mine - logits).abs().max()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
