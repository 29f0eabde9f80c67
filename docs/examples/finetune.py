"""Fine-tunes a language model that you have as a folder, on text of yours, with other peers.

python docs/examples/finetune.py checkpoint/ 'stories/*.txt' --min-peers 2 --listen 127.0.0.1:7700
python docs/examples/finetune.py checkpoint/ 'stories/*.txt' --join 127.0.0.1:7700

The checkpoint is a folder in Hugging Face's layout, tokenizer included, the same on every peer.
Nothing is downloaded. Each peer has texts of its own, or the same ones. With --lora adapters only
are trained and travel, and are merged in the end. docs/library.md says how on several machines.
"""

import argparse
import glob
import random
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset

import murmuration


class Windows(Dataset[dict[str, Tensor]]):
    """Texts one after another, an end-of-text token between them, cut into windows."""

    def __init__(self, paths: list[str], tokenizer: object, context: int) -> None:
        tokens: list[int] = []
        for path in paths:
            tokens += [*tokenizer(Path(path).read_text()).input_ids, tokenizer.eos_token_id]
        self.windows = torch.tensor(tokens).unfold(0, context, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    """Trains, and saves what the swarm agrees on below --save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", help="folder of a model for causal language modelling")
    parser.add_argument("text", help="files to learn from: a path or a glob")
    parser.add_argument("--save", default="finetuned", help="folder for the result")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--inner-steps", type=int, default=50, help="between two rounds")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows at a time")
    parser.add_argument("--accumulate", type=int, default=4, help="batches a step")
    parser.add_argument("--lr", type=float, default=2e-4)
    murmuration.add_arguments(parser)
    options = vars(parser.parse_args())
    own = ("checkpoint", "text", "save", "lora", "steps", "context", "batch", "accumulate", "lr")
    given = argparse.Namespace(**{name: options.pop(name) for name in own})

    on_gpu = torch.cuda.is_available()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.checkpoint, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.checkpoint,
        dtype="auto" if given.lora else torch.float32,  # what is frozen is alike everywhere
        local_files_only=True,
    )
    if given.lora:
        targets = ["q_proj", "v_proj"]
        model = get_peft_model(
            model, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
        )
    arguments = transformers.TrainingArguments(
        output_dir=f"{given.save}-checkpoints",
        max_steps=given.steps,
        data_seed=random.randrange(2**31),  # samples of its own
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=given.lr,
        lr_scheduler_type="cosine",
        warmup_steps=given.steps // 20,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Windows(sorted(glob.glob(given.text)), tokenizer, given.context),
        callbacks=[murmuration.hf.SwarmCallback(preset="streaming", **options)],
    )
    result = trainer.train()
    if given.lora:
        model = model.merge_and_unload()
    model.save_pretrained(given.save)
    tokenizer.save_pretrained(given.save)
    total = sum(p.detach().double().sum() for p in model.parameters())
    print(f"loss {result.training_loss:.6f}, weights {total:.9f}, saved in {given.save}")


if __name__ == "__main__":
    main()
