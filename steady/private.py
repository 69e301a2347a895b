"""What steady uses of torch that torch does not promise to keep: each in one function.

Where torch lacks it, the function does what its docstring says and training goes on, or a
ConfigError names an option that goes without it. When a new torch is out: run the tests, raise
TESTED. Optimizers' `grad_scale` and `found_inf`, which are attributes of fused ones, are the one
thing that is not here: see `train.update`.
"""

import contextlib
import importlib
import json
import re
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from steady.options import ConfigError

TESTED = (2, 15)  # the newest torch that all tests have passed with


def untested() -> str:
    """A line for the screen if this torch is newer than what was tested; else nothing."""
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    newest = ".".join(map(str, TESTED))
    return f"torch {torch.__version__}: tested up to {newest}" if version > TESTED else ""


# --- ranks -----------------------------------------------------------------------------------


def copy_timeout(groups: list, device_type: str):
    """Give process groups the time-out of the default one, as init_device_mesh does not.

    Public from torch 2.15 on as dist.set_timeout, but not how to read it. Without it they have
    torch's own: on a GPU 10 minutes, after which a rank that waits longer fails.
    """
    with contextlib.suppress(AttributeError):
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        options = dist.group.WORLD._get_backend(torch.device(device_type)).options
        for group in groups if options else ():  # an imagined group has none
            set_timeout(options._timeout, group)


def use_fake_backend():
    """Register the backend "fake", whose collectives do nothing, for process groups.

    Raises ConfigError without it.
    """
    try:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    except ImportError:
        raise ConfigError(f"--micro_batch_size auto: torch {torch.__version__} cannot try sizes "
                          "for --parallel zero2 and zero3; expected a number") from None


def fix_buckets(ddp: nn.parallel.DistributedDataParallel):
    """Let a rank lay its gradients out once, before its first step, as after it.

    Else it does so after the first step of a process, and gloo then adds in another order: with
    three ranks or more a restart changes the last bits of the weights, as it does without this.
    """
    with contextlib.suppress(AttributeError):
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()


def no_timing(ddp: nn.parallel.DistributedDataParallel):
    """Without it, DDP waits for the GPU at every 100th step, for times that only its log reads."""
    with contextlib.suppress(AttributeError):
        ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)


def flight_record() -> list[dict]:
    """The newest collectives of this rank, NCCL's and gloo's. Without it: none."""
    entries = []
    with contextlib.suppress(ImportError):
        from torch._C import _distributed_c10d as c10d

        for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
            if dump := getattr(c10d, name, None):
                trace = json.loads(dump(includeCollectives=True, onlyActive=False))
                entries += trace.get("entries", [])
    return entries


def found_inf_flags(scaler: torch.amp.GradScaler, optimizer) -> list[Tensor]:
    """What fp16's scaler found in the gradients of an optimizer, to be changed in place.

    Raises ConfigError without it.
    """
    try:
        return list(scaler._found_inf_per_device(optimizer).values())
    except AttributeError:
        raise ConfigError(f"--precision fp16: torch {torch.__version__} does not let ranks agree "
                          "on a loss scale; expected bf16, fp32 or a single process") from None


# --- kernels and compiler --------------------------------------------------------------------


def sdpa_choice(*tensors, **how) -> int | None:
    """The backend that scaled_dot_product_attention would use; None without this function.

    Raises RuntimeError where none can run.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    return choose and int(choose(*tensors, **how))


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
              fast: bool = False) -> Tensor:
    """The product of two float8 matrices. Without it: torch.nn.functional.scaled_mm."""
    if hasattr(torch, "_scaled_mm"):  # which is the same, and has a kernel on CPUs
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(a, b, scale_a, whole, scale_b, whole, output_dtype=out_dtype,
                       use_fast_accum=fast)


def compile_deterministically():
    """Let the compiler not time kernels to choose one: the choice would differ between processes.

    Without it, a compiled run is as deterministic as that choice.
    """
    with contextlib.suppress(AttributeError, ImportError):
        import torch._inductor.config as inductor

        inductor.deterministic = True


def keep_graphs_whole():
    """Under DDP, compile what is given as one graph. Without it, DDP's compiler splits it."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.config.optimize_ddp = False


def mark_dynamic(tensor: Tensor, dim: int):
    """Compile for any size of a dimension. Without it the second size is compiled anew, once."""
    with contextlib.suppress(AttributeError):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def compilations() -> int | None:
    """Graphs that torch.compile has compiled; None if it is not in use, or without this."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    with contextlib.suppress(AttributeError, KeyError):
        return dynamo and dynamo.counters["stats"]["unique_graphs"]


def is_profiling() -> bool:
    """Whether a torch.profiler is at work, as a fork's own. Without it: never."""
    return getattr(torch.autograd, "_profiler_enabled", lambda: False)()
