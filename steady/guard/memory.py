"""Memory: the size of a micro-batch, shared batches, garbage, advice when memory runs out."""

import gc
import os

import torch
from torch.utils.data import get_worker_info

from steady.options import ConfigError, Failed, due
from steady.ranks.ranks import rank_and_world
from steady.watch.findings import si

MICRO_BATCH_TOKENS = 2**14  # at most, unless --micro_batch_size says otherwise
ON_A_LARGE_GPU = 2**16  # so that weights are cast, and gradients summed, a quarter as often
GC_INTERVAL = 1000  # steps between garbage collections


def micro_batch_size(cfg, world_size: int, most: int = 0, uneven: bool = False) -> int:
    """Sequences per device and forward pass: a divisor of each rank's share of the batch.

    most: the largest that may be chosen if none is asked for (0: MICRO_BATCH_TOKENS).
    uneven: without a divisor it may leave dummy rows. Otherwise, or for more ranks than
    sequences, raises ConfigError with the nearest possible batch sizes.
    """
    per_rank, rest = divmod(cfg.batch_size, world_size)
    given = cfg.micro_batch_size is not None
    limit = cfg.micro_batch_size if given else most or MICRO_BATCH_TOKENS // cfg.seq_len or 1
    if not given and not rest:
        return max(m for m in range(1, min(per_rank, limit) + 1) if per_rank % m == 0)
    unit = world_size * (limit if given else 1)
    if cfg.batch_size % unit and not (uneven and per_rank):
        below = cfg.batch_size // unit * unit
        sizes = f"{below} or {below + unit}" if below else str(unit)
        micro = f" of --micro_batch_size {cfg.micro_batch_size}" if given else ""
        raise ConfigError(
            f"--batch_size {cfg.batch_size}: expected a multiple of {unit} ({world_size} "
            f"process{'es' * (world_size > 1)}{micro}); the nearest is {sizes}; once "
            f"started, a run continues on any number of processes up to {cfg.batch_size} "
            "(--auto_resume)")
    largest_share = -(-cfg.batch_size // world_size)
    return -(-largest_share // -(-largest_share // limit))  # passes of equal size: few dummy rows


def usual_micro_batch(cfg, device_bytes: int) -> int:
    """The most sequences to choose unless asked: of 16,384 tokens, or of up to 65,536 while they
    and the weights take less than half of a GPU's memory (0: not a GPU), by a rough upper bound.
    """
    tokens = MICRO_BATCH_TOKENS
    if device_bytes and cfg.model != "transformers" and cfg.attention != "math":
        # bytes per token: --estimate counts at most 26 d_model + 8 d_ff for a block in bf16
        of_blocks = cfg.n_layer * (7 * cfg.d_model + 2 * cfg.d_ff)
        of_a_token = (8 if cfg.precision == "fp32" else 4) * (of_blocks + 2 * cfg.vocab_size)
        room = device_bytes / 2 - 16 * parameter_count(cfg)  # with gradients and AdamW's state
        tokens = min(max(tokens, int(room / of_a_token)), ON_A_LARGE_GPU)
    return tokens // cfg.seq_len or 1


def parameter_count(cfg) -> int:
    attention = 2 * (cfg.n_head + cfg.n_kv_head) * cfg.head_dim
    embeddings = (1 if cfg.tie_embeddings else 2) * cfg.vocab_size
    return cfg.d_model * (embeddings + cfg.n_layer * (attention + 3 * cfg.d_ff))


def memory_bytes(device: torch.device) -> int:
    """Total memory of the GPU or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(cfg, device: torch.device, shards: int = 1):
    """Raise ConfigError if the weights, in `shards` parts, exceed the memory of the device.

    On a CPU, the weights of all ranks of this host count; each GPU has one rank.
    """
    weights, memory = parameter_count(cfg), memory_bytes(device)
    copies = (1 if device.type == "cuda" else rank_and_world()[3]) / shards
    if (2 if cfg.lora_rank else 4) * weights * copies > memory:
        raise ConfigError(f"a model of {si(weights)} parameters takes {weights * 4e-9:,.0f} GB in "
                          f"fp32, here in {copies:g} copies; expected less than the "
                          f"{memory / 1e9:,.0f} GB of memory; choose smaller sizes")


def choose_micro_batch(cfg, ranks, uneven: bool) -> int:
    """The micro-batch size of all ranks: as asked for, or usual."""
    # from all of a GPU's memory, free or not, so that a resume chooses the same
    on_gpu = ranks.device.type == "cuda"
    most = usual_micro_batch(cfg, memory_bytes(ranks.device) if on_gpu else 0)
    return micro_batch_size(cfg, ranks.world_size, ranks.minimum(most), uneven)


def out_of_memory(error: BaseException) -> bool:
    """Whether torch's or the CPU's allocator, CUDA (loading a kernel) or cuBLAS raised it."""
    plain = "can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED"  # as RuntimeErrors
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in plain)


def memory_advice(ranks, batch_size: int, error: BaseException) -> str:
    """The error message (CUDA's has the free memory), and the --micro_batch_size to try."""
    per_rank, rest = divmod(batch_size, ranks.world_size)
    smaller = [m for m in range(1, ranks.micro_batch // 2 + 1) if rest or per_rank % m == 0]
    advice = (f"try --micro_batch_size {smaller[-1]}; the result stays the same" if smaller else
              "try --activation_checkpointing full, or a shorter --seq_len")
    return f"out of memory: {str(error).splitlines()[0].rstrip('.')}; {advice}"


def to_shared_memory(batch: tuple) -> tuple:
    """In a loader process, copy a batch to shared memory before the queue to the trainer does: its
    thread would drop a batch without room there, and the trainer wait for ever. Raises Failed.
    """
    try:
        for tensor in filter(torch.is_tensor, batch if get_worker_info() else ()):
            tensor.share_memory_()
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise Failed(f"a loader process cannot hand over a batch in /dev/shm: {reason}; make it "
                     "larger (docker run --shm-size 1g), or take --num_workers 0") from None
    return batch


def collect_garbage(step: int, first_step: int):
    """Collect at fixed steps, equal on all ranks, and in a process's first, as part of start-up."""
    if step == first_step or due(step, GC_INTERVAL):
        gc.collect()
    if step == first_step:
        gc.freeze()  # objects alive now will stay: later collections skip them


def clear_cache(device: torch.device, step: int, every: int):
    """Return cached device memory to the driver, after the log that reports its size."""
    if device.type == "cuda" and due(step, every):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
