"""The private functions of torch that steady uses, each wrapped in one function.

If torch lacks one, its wrapper does as its docstring says, and training goes on. The attributes
`grad_scale` and `found_inf` of fused optimizers are private, too: see `train.update`.
"""

import contextlib
import importlib

import torch
from torch import Tensor, nn

# --- ranks -----------------------------------------------------------------------------------


def use_fake_backend():
    """Register the backend "fake" for --estimate: its collectives do nothing."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")


def fix_buckets(ddp: nn.parallel.DistributedDataParallel):
    """Build DDP's final gradient buckets before the first step. Without this, it does so after that
    step, gloo then adds in another order, and a restart on three ranks changes the last bits.
    """
    with contextlib.suppress(AttributeError):
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()


def no_timing(ddp: nn.parallel.DistributedDataParallel):
    """Stop DDP from timing steps for its log: it would wait for the GPU at every 100th step."""
    with contextlib.suppress(AttributeError):
        ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)


def require_reduced(model: nn.Module):
    """Raise RuntimeError if DDP waits for the gradient of a weight; without this, a step later."""
    with contextlib.suppress(AttributeError):
        model._check_reducer_finalized()


# --- kernels and compiler --------------------------------------------------------------------


def sdpa_choice(*tensors, **how) -> int | None:
    """The backend that SDPA would use; None without this function. RuntimeError if none can run."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and int(choose(*tensors, **how))


def compile_deterministically():
    """Stop the compiler from timing kernels to choose one: processes would choose differently.

    Without it, a compiled run is as deterministic as that choice.
    """
    with contextlib.suppress(AttributeError, ImportError):
        import torch._inductor.config as inductor

        inductor.deterministic = True


def keep_graphs_whole():
    """Under DDP, compile each function as one graph. Without this, DDP's compiler splits it."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.config.optimize_ddp = False


def mark_dynamic(tensor: Tensor, dim: int):
    """Compile for any size of a dimension. Without this, the second size is compiled anew, once."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
