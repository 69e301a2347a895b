"""Device, number format and attention backend of a run."""

import contextlib
import ctypes
import os
import platform
import re

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from steady import private
from steady.options import ConfigError
from steady.watch.proc import read, usable_cores

# --- device and number format ----------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Dense peak TFLOP/s (bf16 and fp16, fp32) by torch's exact device name: a substring would take an
# "RTX A1000" for an A100. As the vendors state them, without sparsity; fp32 without TF32,
# torch's default. GeForce: accumulating in fp32, from NVIDIA's architecture white papers.
PEAK_TFLOPS = {name: peaks for names, peaks in (
    ("NVIDIA B300 SXM6 AC, NVIDIA B200", (2250, 75)),  # HGX B300: an eighth of 36 PFLOP/s
    ("NVIDIA H100 80GB HBM3, NVIDIA H200, NVIDIA GH200 480GB, NVIDIA H800", (989, 67)),
    ("NVIDIA H100 PCIe, NVIDIA H800 PCIe", (756, 51)),
    ("NVIDIA H100 NVL", (835, 60)),
    ("NVIDIA H20", (148, 44)),
    ("NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-40GB, NVIDIA A100 80GB PCIe, "
     "NVIDIA A100-PCIE-40GB, NVIDIA A800-SXM4-80GB, NVIDIA A800 80GB PCIe", (312, 19.5)),
    ("NVIDIA L40S", (362, 91.6)),
    ("NVIDIA L4", (121, 30.3)),
    ("NVIDIA A10G", (70, 35)),
    ("NVIDIA GeForce RTX 5090", (209.5, 104.8)),
    ("NVIDIA GeForce RTX 4090", (165.2, 82.6)),
    ("NVIDIA GeForce RTX 4090 D", (147.1, 73.5)),  # the 4090's by cores: 14,592 of 16,384
    ("NVIDIA GeForce RTX 3090", (71, 35.6)),
    ("Tesla V100-SXM2-32GB, Tesla V100-SXM2-16GB", (125, 15.7)),  # fp16; it has no bf16
    ("Tesla V100-PCIE-32GB", (112, 14)),
    ("Tesla T4", (65, 8.1)),
    ("AMD Instinct MI300X", (1307.4, 163.4)),
) for name in names.split(", ")}


def peak_flops(device: torch.device, dtype: torch.dtype, tflops: float | None = None,
               devices: int = 1) -> float | None:
    """Peak FLOP/s of `devices` in products of this dtype; None if unknown. tflops: of one."""
    if not tflops and device.type == "cuda":
        half, single = PEAK_TFLOPS.get(torch.cuda.get_device_name(device), (None, None))
        tflops = single if dtype == torch.float32 else half
    return tflops * 1e12 * devices if tflops else None


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of this process. Raises ConfigError if torch finds no such device."""
    found = torch.accelerator.current_accelerator(check_available=True)
    found = found.type if found and found.type in ("cuda", "mps") else "cpu"
    name = found if name == "auto" else name
    if name not in ("cpu", found):
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no such device")
    if name == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(f"{torch.cuda.device_count()} GPUs: expected one for each process")
    return torch.device(name, local_rank if name == "cuda" else None)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16; emulation is 4 times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return False


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        precision = "bf16" if multiplies_bf16(device) else "fp32"
    return DTYPES[precision]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"model name\s*: (.*)", read("proc/cpuinfo"))
    threads = torch.get_num_threads()
    name = model[1] if model else platform.machine()
    return f"{name}, {threads} thread{'s' * (threads > 1)}"


def pick_workers(num_workers: str, device: torch.device, local_world_size: int) -> int:
    """Loader processes for this rank. auto: 2 with CUDA, where waiting for a disk must not delay
    kernel launches; 0 on a CPU: 64 x 1,024 tokens take 0.23 ms, 1.8 ms from another process.
    """
    if num_workers != "auto":
        return int(num_workers)
    return min(2, usable_cores() // local_world_size) if device.type == "cuda" else 0


def configure(cfg, device: torch.device):
    """Set process-wide state: memory, tiny numbers, attention backends, determinism on CUDA."""
    if device.type == "cpu":
        # numbers below 1.2e-38, as in moments of unused tokens, take x86 ten times as long
        torch.set_flush_denormal(True)
        # Do not return freed memory to the kernel, which would clear it anew for each step: a sixth
        # of the time of gpt2-124m. Fragmentation costs up to a fifth more memory, with torch's huge
        # pages another 6 %. Only with glibc; its own variables take precedence.
        if not any(name.startswith("MALLOC_") for name in os.environ):
            with contextlib.suppress(AttributeError, OSError, TypeError):
                mallopt = ctypes.CDLL(None).mallopt
                mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: larger tensors get a mapping of their own
                mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: bytes to keep at the end of the heap
    set_attention_backend(cfg.attention)
    if cfg.attention == "auto" and cfg.data_mode != "stream":
        # cuDNN plans anew for each shape, 23 to 37 ms in a published trace; before 9.25 it takes no
        # empty documents, the padding of `packing.boundaries`: NVIDIA/cudnn-frontend#944
        torch.backends.cuda.enable_cudnn_sdp(False)
    if cfg.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at start
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # slow; it only finds bugs
        private.compile_deterministically()


# --- attention -------------------------------------------------------------------------------


def set_attention_backend(name: str):
    """Allow one backend of scaled_dot_product_attention, or with auto all of them.

    math is always allowed, as a fallback: cuDNN refuses the single token that begins a sample.
    """
    for backend in ("flash", "mem_efficient", "cudnn", "math"):
        enable = getattr(torch.backends.cuda, f"enable_{backend}_sdp")
        enable(name in ("auto", backend.removeprefix("mem_")) or backend == "math")


VARLEN = "varlen flash"  # for packed rows; all others need a mask of T x T


def takes_varlen(cfg, dtype: torch.dtype) -> bool:
    """Whether packed rows need no mask on a CUDA GPU with flash attention."""
    return (cfg.data_mode == "packed" and cfg.attention in ("auto", "flash") and cfg.dropout == 0
            and cfg.head_dim in range(8, 257, 8)  # the limits of flash attention
            and dtype != torch.float32 and torch.version.hip is None)


def attention_backend(cfg, device: torch.device, dtype: torch.dtype) -> str:
    """VARLEN, matmul (see `layers.attend`), or the choice of torch's dispatcher for this shape.

    Raises ConfigError if the only allowed one cannot run.
    """
    T, D = cfg.seq_len, cfg.head_dim
    q = torch.empty(1, cfg.n_head, T, D, device=device, dtype=dtype, requires_grad=True)
    kv = torch.empty(1, cfg.n_kv_head, T, D, device=device, dtype=dtype)
    packed, grouped = cfg.data_mode == "packed", cfg.n_kv_head != cfg.n_head
    if device.type == "cuda" and takes_varlen(cfg, dtype) and can_use_flash_attention(
            SDPAParams(q, kv, kv, None, 0.0, True, grouped)):
        return VARLEN
    if (cfg.attention == "auto" and cfg.model != "transformers" and device.type == "cpu"
            and dtype == torch.bfloat16):
        return "matmul"
    mask = None
    if packed:  # allocates one row only
        mask = torch.ones(1, 1, 1, T, dtype=torch.bool, device=device).expand(1, 1, T, T)
    used = "math" if device.type == "mps" else None  # torch has no choice on mps
    with contextlib.suppress(RuntimeError):  # no backend is left to choose from
        choice = private.sdpa_choice(q, kv, kv, mask, dropout_p=cfg.dropout,
                                     is_causal=mask is None, enable_gqa=grouped)
        used = cfg.attention
        if choice is not None:
            used = SDPBackend(choice).name.lower().removesuffix("_attention")
    if used is None or cfg.attention not in ("auto", used):
        raise ConfigError(f"--attention {cfg.attention}: not available on {device.type} for "
                          f"{dtype} heads of width {D}; expected one that is, or auto")
    return used
