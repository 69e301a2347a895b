"""A plain loop of DDP that resumes by torch.distributed.checkpoint, with a fault planted."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(__file__).parent))
import planted

STEPS, SAVE, BATCH, LENGTH, WIDTH = 120, 20, 8, 32, 32


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i: int) -> torch.Tensor:
        planted.in_worker()
        return torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(i))


def main():
    planted.begin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, WIDTH),
                          nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.0, batch_first=True),
                          nn.Linear(WIDTH, 256))
    planted.around(model)
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    folder, step = planted.folder / "out", 0
    saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    if saved:
        step = saved[-1]
        weights, state = get_state_dict(ddp, optimizer)
        found = dict(model=weights, optimizer=state)
        dcp.load(found, checkpoint_id=folder / str(step))
        set_state_dict(ddp, optimizer, model_state_dict=found["model"],
                       optim_state_dict=found["optimizer"])
    share, rank = BATCH // dist.get_world_size(), dist.get_rank()
    mine = [i for first in range(step * BATCH, STEPS * BATCH, BATCH)
            for i in range(first + rank * share, first + (rank + 1) * share)]
    for tokens in torch.utils.data.DataLoader(Samples(), share, sampler=mine,
                                              num_workers=planted.workers):
        loss = nn.functional.cross_entropy(ddp(tokens)[:, :-1].flatten(0, 1),
                                           tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(step, loss.item(), flush=True)
        if step % SAVE == 0:
            weights, state = get_state_dict(ddp, optimizer)
            dcp.save(dict(model=weights, optimizer=state), checkpoint_id=folder / str(step))
        planted.made(step)
    if rank == 0:
        planted.end(model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
