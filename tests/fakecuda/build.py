"""Build the libraries of the fake device: device.c, driver.c, and a success for everything else.

python tests/fakecuda/build.py FOLDER: for the CUDA build of torch of this interpreter. A process
sees the device with LD_PRELOAD=FOLDER/device.so and LD_LIBRARY_PATH=FOLDER.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA_LIBRARIES = re.compile(r"(_*cuda|cublas|nccl)[A-Za-z]\w*")
# What the header needs of those of nvcc, which is not in torch's packages.
HOST_DEFINES = """
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __inline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __annotate__(a)
#define __location__(a)
"""


def cuda_python() -> str | None:
    """An interpreter with a CUDA build of torch, which need not find a GPU; None without one."""
    for python in filter(None, (os.environ.get("STEADY_CUDA_PYTHON"), sys.executable)):
        asked = subprocess.run([python, "-c", "import torch; print(torch.version.cuda)"],
                               capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.strip() != "None":
            return python
    return None


def build(python: str, folder: Path):
    """For the torch of that interpreter."""
    built = subprocess.run([python, __file__, str(folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr


def variables(folder: Path) -> dict[str, str]:
    """With which a process sees the device that was built there."""
    paths = filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))
    return dict(LD_PRELOAD=str(folder / "device.so"), LD_LIBRARY_PATH=os.pathsep.join(paths),
                TORCHINDUCTOR_CACHE_DIR=str(folder / "compiled"),
                TORCHINDUCTOR_COMPILE_THREADS="1")  # others take longer to start


def build_here(folder: Path):
    site = Path(importlib.util.find_spec("torch").origin).parent.parent
    libraries = site / "torch" / "lib"
    include = next(site.glob("nvidia/*/include/driver_types.h")).parent
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text(HOST_DEFINES)
    paths = [f"-I{folder}", f"-I{include}"]
    users = ["torch_cuda", "c10_cuda", "torch_python", "torch_cpu", "torch_cuda_linalg"]
    wanted = undefined([libraries / f"lib{name}.so" for name in users])
    wanted = {name for name in wanted if CUDA_LIBRARIES.fullmatch(name)}
    compile_library(folder / "device.so", HERE / "device.c", wanted, paths)
    asked = undefined([libraries / "libcaffe2_nvrtc.so"])
    helper = site / "triton/backends/nvidia/driver.c"  # which Triton compiles when it starts
    asked |= set(re.findall(r"\bcu[A-Z]\w*", helper.read_text() if helper.exists() else ""))
    driver = {name for name in asked if re.fullmatch(r"cu[A-Z][A-Za-z]*(_v\d)?", name)}
    compile_library(folder / "libcuda.so.1", HERE / "driver.c", driver,
                    ["-Wl,-soname,libcuda.so.1"])


def undefined(libraries: list[Path]) -> set[str]:
    """Names that these libraries expect of others."""
    there = [str(path) for path in libraries if path.exists()]
    text = subprocess.run(["nm", "-D", "--undefined-only", *there], check=True,
                          capture_output=True, text=True).stdout
    return set(re.findall(r"^ +[UwV] (\w+)", text, re.MULTILINE))


def compile_library(path: Path, source: Path, names: set[str], flags: list[str]):
    """Compile `source`, with functions that return 0 for those of `names` that it does not have."""
    others = path.with_suffix(".c")
    others.write_text("".join(f"__attribute__((weak)) int {name}() {{ return 0; }}\n"
                              for name in sorted(names)))
    subprocess.run(["gcc", "-std=gnu11", "-shared", "-fPIC", "-w", "-O1", *flags, str(source),
                    str(others), "-o", str(path)], check=True)


if __name__ == "__main__":
    build_here(Path(sys.argv[1]))
