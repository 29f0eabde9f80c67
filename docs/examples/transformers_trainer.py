"""`transformers.Trainer` as a peer of a swarm; with --lora only adapters are trained and travel.

python docs/examples/transformers_trainer.py --listen 127.0.0.1:7700 --min-peers 2
python docs/examples/transformers_trainer.py --join 127.0.0.1:7700
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset

import murmuration


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """This file, over and over, in pieces of 64 bytes."""

    def __init__(self) -> None:
        self.pieces = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 4)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--lora", action="store_true")
murmuration.add_arguments(parser)
options = vars(parser.parse_args())
steps, lora = options.pop("steps"), options.pop("lora")

torch.manual_seed(0)  # the frozen weights under the adapters have to be the same everywhere
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
)
if lora:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        data_seed=random.randrange(2**31),  # samples of its own
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    callback = murmuration.hf.SwarmCallback(inner_steps=10, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=Bytes(), callbacks=[callback])
    result = trainer.train()
trained = [p.detach() for p in model.parameters() if p.requires_grad]
print(f"loss {result.training_loss:.6f}, weights {sum(p.double().sum() for p in trained):.9f}")
