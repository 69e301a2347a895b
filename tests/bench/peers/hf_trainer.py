"""The Trainer of transformers on a tiny model, with a fault: torchrun … hf_trainer.py FOLDER PLAN.

Needs `pip install accelerate`. Resumes as its documentation says.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import planted

STEPS, SAVE, BATCH, LENGTH = 120, 20, 8, 32


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i: int) -> dict:
        planted.in_worker()
        tokens = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return dict(input_ids=tokens, labels=tokens)


class Note(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        planted.made(state.global_step)


def main():
    planted.begin()
    # or ddp_timeout is not heeded on a CPU (transformers 5.23, accelerate 1.15)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False))
    planted.around(model)
    folder = planted.folder / "out"
    args = TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=SAVE, logging_steps=10, report_to=[],
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]), use_cpu=True,
        dataloader_num_workers=planted.workers, ddp_timeout=60, disable_tqdm=True, seed=0,
        save_total_limit=3)
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    trainer = Trainer(model, args, train_dataset=Samples(), callbacks=[Note()])
    trainer.train(resume_from_checkpoint=last)
    if args.process_index == 0:
        planted.end({name: p.detach() for name, p in model.named_parameters()})
    torch.distributed.barrier()


main()
