"""Checkpoints: a file is valid or it is not there. Writing, verifying, finding, loading.

A checkpoint is what `torch.save` writes, with a checksum of all of it in the comment that a zip
file may end with, so that `torch.load` and `unzip` read it like any other.
"""

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import struct
import threading
import zlib
from pathlib import Path

import torch
from torch import nn

from steady.cli import ConfigError, fixed_options
from steady.retry import retry
from steady.tokens import split_weight

CHECKPOINT = re.compile(r"step_(\d{8,})\.pt")
DRAFT = re.compile(r"(step_\d{8,}|best)\.pt\.(tmp|backup)-\d+")
SEAL = struct.Struct("<16sI")  # SEAL_NAME, CRC-32 of everything before the seal
SEAL_NAME = b"steady checksum:"
ZIP_END = struct.Struct("<4s16sH")  # signature, fields not used here, length of the comment
CHUNK_BYTES = 1 << 24
MAX_FAILURES = 3  # saves in a row that may fail before training stops
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, or file size limit

# --- one file --------------------------------------------------------------------------------


class ChecksummedFile:
    """A file for torch.save to write to, sequentially; keeps a checksum of its bytes."""

    def __init__(self, file):
        self.file, self.crc, self.last = file, 0, b""

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if self.last:  # held back, since `seal` changes the last bytes of the file
            self.write_through(self.last)
        self.last = bytes(data[-ZIP_END.size :])
        self.write_through(data[: -ZIP_END.size])
        return len(data)

    def write_through(self, data):
        self.crc = zlib.crc32(data, self.crc)
        self.file.write(data)

    def flush(self):
        self.file.flush()

    def seal(self):
        """Append the checksum as the comment of the zip file."""
        signature, rest, length = ZIP_END.unpack(self.last)
        assert signature == b"PK\5\6" and length == 0, "torch.save has changed its format"
        self.write_through(ZIP_END.pack(signature, rest, SEAL.size))
        self.file.write(SEAL.pack(SEAL_NAME, self.crc))
        self.file.flush()


def write_checkpoint(path: Path, state: dict):
    """Write `state`, verify every byte on the disk, and only then give the file its name."""
    with atomic_write(path) as draft:
        with open(draft, "wb") as file:
            sealed = ChecksummedFile(file)
            torch.save(state, sealed)
            sealed.seal()
            os.fsync(file.fileno())
            forget_cached(file.fileno())
        wrong = find_corruption(draft)
        if wrong:
            raise OSError(f"{draft}: {wrong}: what was read back is not what was written")


def find_corruption(path: Path) -> str | None:
    """Read every byte of a checkpoint file; returns what is wrong with it, or None."""
    size = path.stat().st_size
    if size < SEAL.size + ZIP_END.size:
        return f"only {size} bytes"
    with open(path, "rb") as file:
        crc, left = 0, size - SEAL.size
        while left:
            data = file.read(min(CHUNK_BYTES, left))
            if not data:
                return "it became shorter while it was being read"
            crc, left = zlib.crc32(data, crc), left - len(data)
        seal = file.read()
        forget_cached(file.fileno())
    if seal[: len(SEAL_NAME)] == SEAL_NAME:
        return None if SEAL.unpack(seal) == (SEAL_NAME, crc) else "its checksum is wrong"
    return "its checksum is missing: cut short, or not written by this program"


def find_damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint file or with what it holds, or None."""
    wrong = find_corruption(path)
    if wrong:
        return wrong
    try:
        return find_odd_contents(torch.load(path, map_location="meta", weights_only=True))
    except OSError:
        raise
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        return f"torch cannot load it ({type(e).__name__})"


def find_odd_contents(state) -> str | None:
    """What a state lacks, or holds in another type than `save_checkpoint` writes, or None.

    A state of another format is not judged here: `load_checkpoint` refuses it.
    """
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        return "it holds no state of a run"
    if state["format"] != FORMAT:
        return None
    for name, kinds in CONTENTS.items():
        if not isinstance(state.get(name), kinds):
            return f"its {name} is missing or of another type"
    if any(state[name] < 0 for name in ("step", "position", "tokens", "best_step")):
        return "its step, position, tokens or best_step is negative"
    if not all(isinstance(tensor, torch.Tensor) for tensor in state["model"].values()):
        return "its model holds something else than tensors"
    if not all(isinstance(o, dict) and isinstance(o.get("state"), dict)
               for o in state["optimizers"]):
        return "its optimizers have no state"
    if not all(isinstance(file, (list, tuple)) and len(file) > 2 for file in state["data"]):
        return "its data is not a list of files"
    saved = state["config"]
    sources = saved.get("data")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        return "its config has no data"
    if any(type(saved.get(name)) is not int for name in ("max_steps", "warmup_steps")):
        return "its config has no max_steps or warmup_steps"
    return None


def forget_cached(descriptor: int):
    """Drop a file from the page cache: verify the disk, and leave memory to the training data."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def atomic_write(path: Path):
    """Yields a draft beside `path` to write to, which replaces it if nothing was raised."""
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)  # the new name itself must be on the disk
        os.close(directory)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


# --- the files of a run ----------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The step_N.pt files of a run, oldest first, without links and other names."""
    found = [p for p in folder.glob("step_*.pt") if CHECKPOINT.fullmatch(p.name)]
    return sorted((p for p in found if p.is_file() and not p.is_symlink()), key=checkpoint_step)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.pt"


def checkpoint_step(path: Path) -> int:
    return int(CHECKPOINT.fullmatch(path.name)[1])


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint is in; None for a file that was moved elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def require_valid(path: Path):
    """Raise ConfigError if a checkpoint is damaged."""
    wrong = retry(lambda: find_damage(path))
    if wrong:
        raise ConfigError(f"{path}: not a checkpoint that can be read: {wrong}")


def latest_valid(folder: Path) -> Path | None:
    """The newest valid checkpoint; damaged ones after it are set aside.

    None if there are none at all. Raises ConfigError, and changes nothing, if all are damaged.
    """
    bad = []
    for path in reversed(list_checkpoints(folder)):
        wrong = retry(lambda path=path: find_damage(path))
        if not wrong:
            for damaged, why in bad:
                damaged.rename(damaged.with_name(damaged.name + ".corrupt"))
                print(f"warning: {damaged}: {why}; set aside as .corrupt", flush=True)
            return path
        bad.append((path, wrong))
    if bad:
        reasons = "; ".join(f"{damaged.name}: {why}" for damaged, why in bad)
        raise ConfigError(f"{folder}: no checkpoint is valid ({reasons}). Bring one back from a "
                          "backup, or start afresh with --overwrite")
    return None


def rotate(folder: Path, keep: int, keep_every: int):
    """Delete all but the newest `keep` checkpoints and those at multiples of `keep_every`."""
    for old in list_checkpoints(folder)[:-keep]:
        if not keep_every or checkpoint_step(old) % keep_every:
            old.unlink()


def remove_drafts(folder: Path):
    """Delete what a killed process left unfinished; only for the process that holds the lock."""
    for path in folder.iterdir():
        if DRAFT.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def compare(a, b, name: str = "") -> tuple[int, list[str]]:
    """(number of leaves, names of those that differ in a bit) of two nested states."""
    if isinstance(a, (dict, list, tuple)) and type(a) is type(b) and len(a) == len(b):
        items = a.items() if isinstance(a, dict) else enumerate(a)
        found = [compare(v, b.get(k) if isinstance(b, dict) else b[k], f"{name}.{k}".lstrip("."))
                 for k, v in items]
        return sum(n for n, _ in found), [d for _, ds in found for d in ds]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(a, b)
    else:
        same = a == b
    return 1, [] if same else [name]


# --- writing beside training -----------------------------------------------------------------


class Writer:
    """Writes checkpoints in a thread: training waits for a copy to host memory, not for the disk.

    The host memory is allocated once. At most one write is in flight; the next save waits for it.
    backup: a Backup, which is offered each file that was written and verified.
    """

    def __init__(self, folder: Path, keep: int, keep_every: int = 0, backup=None,
                 best=(math.inf, 0)):
        self.folder, self.keep, self.keep_every, self.backup = folder, keep, keep_every, backup
        self.in_best = best  # (loss, step) of best.pt
        self.buffers, self.thread, self.step = {}, None, 0
        self.failures = 0  # in a row

    def save(self, step: int, state: dict, is_best: bool = False):
        """Copy `state` and have it written as step_N.pt and, if it is the best, as best.pt.

        Raises OSError after too many failures in a row.
        """
        if self.thread and self.thread.is_alive():
            print(f"step {step}: waiting until the checkpoint of step {self.step} is written",
                  flush=True)
        self.wait()
        if self.failures >= MAX_FAILURES:
            raise OSError(f"{self.folder}: {self.failures} checkpoints in a row could not be "
                          "written")
        weights = [t for t in state["model"].values() if t.is_floating_point()]
        norm = torch.stack(torch._foreach_norm(weights)).sum()  # not finite if any weight is not
        copied, event = self.copy_to_host(dict(state, weights_norm=norm), "", {}), None
        if norm.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self.step = step
        self.thread = threading.Thread(target=self.write, args=(step, copied, event, is_best))
        self.thread.start()

    def copy_to_host(self, value, key: str, seen: dict):
        """`value` with each tensor copied to the host buffer that belongs to its key."""
        if isinstance(value, dict):
            return {k: self.copy_to_host(v, f"{key}/{k}", seen) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            copies = (self.copy_to_host(v, f"{key}/{i}", seen) for i, v in enumerate(value))
            return type(value)(copies)
        if not isinstance(value, torch.Tensor):
            return value
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and place in seen:  # tied weights stay one tensor
            return seen[place]
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self.buffers[key] = buffer
        seen[place] = buffer.copy_(value.detach(), non_blocking=value.is_cuda)
        return buffer

    def write(self, step: int, state: dict, event, is_best: bool):
        path = checkpoint_path(self.folder, step)
        try:
            if event:
                event.synchronize()
            if not state.pop("weights_norm").isfinite():
                print(f"warning: step {step}: the weights are not finite; not saved", flush=True)
                return
            retry(lambda: write_checkpoint(path, state))
            if is_best:
                with atomic_write(self.folder / "best.pt") as draft:
                    link_or_copy(path, draft)
                self.in_best = state["best_loss"], step
            rotate(self.folder, self.keep, self.keep_every)
            self.failures = 0
        except Exception as e:
            self.failures += 1
            print(f"warning: step {step}: the checkpoint could not be written, training goes on "
                  f"({self.failures} of {MAX_FAILURES}): {disk_error(e, self.folder)}", flush=True)
            return
        if self.backup:
            self.backup.offer(step, path)

    def best(self) -> tuple[float, int]:
        """(validation loss, step) of the weights in best.pt."""
        self.wait()
        return self.in_best

    def wait(self):
        """Wait until the write in flight is on the disk."""
        if self.thread:
            self.thread.join()

    def close(self, copy: bool):
        """Wait for the disk and, with `copy`, for a backup of the newest checkpoint.

        Raises OSError if the last checkpoint could not be written.
        """
        self.wait()
        if self.backup and copy:
            self.backup.close()
        if self.failures:
            raise OSError(f"{self.folder}: the last checkpoint, of step {self.step}, is not there")


def disk_error(error: BaseException, folder: Path) -> str:
    """Describe an error in writing to `folder`: torch hides a full disk behind its own."""
    if not folder.is_dir():
        return f"{folder} is gone: was it moved or deleted while this run writes there?"
    cause = error
    while cause and getattr(cause, "errno", None) not in FULL:
        cause = cause.__cause__ or cause.__context__
    if not cause:
        return str(error)
    usage = shutil.disk_usage(folder)
    return (f"no space left on {folder}: {usage.free / 1e9:.2f} of {usage.total / 1e9:.1f} GB are "
            f"free ({cause.strerror})")


def link_or_copy(path: Path, draft: Path):
    try:
        os.link(path, draft)
    except OSError:  # no hard links on this file system
        shutil.copyfile(path, draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())


# --- the state of a run ----------------------------------------------------------------------

FORMAT = 3  # of the dict in a checkpoint file; 1 had no position, 2 no evaluated_step
CONTENTS = dict(  # what the dict must have, and its type
    step=int, position=int, tokens=int, best_loss=(int, float), best_step=int, evaluated_step=int,
    nonfinite=(int, float, torch.Tensor), rollbacks=list, model=dict, optimizers=list,
    optimizer_names=list, scaler=dict, config=dict, data=list,
)
PROGRESS = ("step", "position", "tokens", "best_loss", "best_step", "evaluated_step", "rollbacks")


def save_checkpoint(run, is_best: bool = False):
    """Start writing step_N.pt, and best.pt if it is the best, unless this state is saved already.

    Only rank 0 writes: weights and optimizers are the same on all ranks. There is no generator
    state: random numbers are a function of (seed, step, rank).
    """
    failed = run.writer is not None and run.writer.failures > 0
    if run.saved == saved_at(run) and not failed:
        return
    run.saved = saved_at(run)
    if run.rank:
        return
    previous = run.monitor.phase("checkpoint")
    data = run.train_data
    state = dict(
        format=FORMAT,
        **{name: getattr(run, name) for name in PROGRESS},
        nonfinite=run.nonfinite,
        model=run.model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in run.optimizers],
        optimizer_names=[parameter_names(run.model, optimizer) for optimizer in run.optimizers],
        scaler=run.scaler.state_dict(),
        config=dataclasses.asdict(run.cfg),
        data=data.fingerprint,
        tokenizer=data.tokenizer,
        end_of_text=data.end_of_text,
        vocab_size=data.vocab_size,
    )
    run.writer.save(run.step, state, is_best)
    run.monitor.phase(previous)


def saved_at(run) -> tuple:
    """What tells one state of a run from another: a checkpoint is saved if any of it changed."""
    return run.step, run.position, run.evaluated_step, run.best_step


def parameter_names(model: nn.Module, optimizer) -> list[str]:
    """Names of the parameters that an optimizer holds, in its order."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def load_checkpoint(run, path: Path) -> dict:
    """Restore `run` from a file that has been verified; returns the options it was saved with.

    Raises ConfigError if it does not belong to this run.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        version = state["format"]
    except Exception as e:  # zipfile, pickle and torch each have errors of their own
        raise ConfigError(f"{path}: not a checkpoint that can be read ({type(e).__name__})") from e
    if version != FORMAT:
        raise ConfigError(f"{path}: format {version}; this version reads {FORMAT}")
    wrong = find_odd_contents(state)
    if wrong:
        raise ConfigError(f"{path}: not a checkpoint that can be read: {wrong}")
    refuse_changes(run, path, state)
    try:
        run.model.load_state_dict(state["model"])
    except RuntimeError as e:
        raise ConfigError(f"{path}: not a checkpoint of this model: {e}") from None
    counts = len(run.optimizers), len(state["optimizers"]), len(state["optimizer_names"])
    if len(set(counts)) > 1:
        raise ConfigError(f"{path}: it holds {counts[1]} optimizers; expected {counts[0]}")
    for optimizer, saved, names in zip(
        run.optimizers, state["optimizers"], state["optimizer_names"], strict=True
    ):
        if parameter_names(run.model, optimizer) != names:
            raise ConfigError(f"{path}: its optimizer holds other parameters, or in another order")
        # Learning rate, decay and betas are those of this run's flags, not the saved ones.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(saved | {"param_groups": groups})
    if state["scaler"] and run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    for name in PROGRESS:
        setattr(run, name, state[name])
    run.nonfinite = torch.as_tensor(state["nonfinite"]).to(run.device)
    run.saved = saved_at(run)
    return state["config"]


def reconcile_best(run) -> tuple[float, int]:
    """Make best.pt agree with the restored run; returns (loss, step) of what it then holds.

    best.pt is older if a save failed or the process was killed before replacing it, and newer if
    the run continues from an earlier checkpoint.
    """
    folder = run.out_dir / "checkpoints"
    best, wanted = folder / "best.pt", checkpoint_path(folder, run.best_step)
    found = read_best(best)
    if found == (run.best_loss, run.best_step):
        return found
    if run.best_step and read_best(wanted) == (run.best_loss, run.best_step):
        with atomic_write(best) as draft:
            link_or_copy(wanted, draft)
        return run.best_loss, run.best_step
    if found and 0 < found[1] <= run.step:
        print(f"warning: the weights of the best validation loss, {run.best_loss:.4f} at step "
              f"{run.best_step}, were lost; {best} is of step {found[1]}", flush=True)
        return found
    if best.exists():
        set_aside(best)
    return math.inf, 0


def read_best(path: Path) -> tuple[float, int] | None:
    """(validation loss, step) of a checkpoint that was the best when it was saved; else None."""
    if not path.is_file() or find_damage(path):
        return None
    state = torch.load(path, map_location="meta", weights_only=True)
    is_best = state.get("best_step") == state.get("step")
    return (state["best_loss"], state["step"]) if is_best else None


def set_aside(path: Path):
    """Rename a file to NAME.set-aside, or .set-aside-2, …, so that nothing takes it for current."""
    new, n = path.with_name(f"{path.name}.set-aside"), 2
    while new.exists():
        new, n = path.with_name(f"{path.name}.set-aside-{n}"), n + 1
    path.rename(new)


def refuse_changes(run, path: Path, state: dict):
    """Raise ConfigError if model, data or an option that fixes the trajectory has changed."""
    cfg, saved, data = run.cfg, state["config"], run.train_data
    weights = fixed_options(cfg, "weights")
    compared = weights + fixed_options(cfg, "function")
    if not cfg.eval_only:
        compared += fixed_options(cfg, "trajectory")
    changed = {name: f"{saved[name]} -> {getattr(cfg, name)}" for name in compared
               if name in saved and saved[name] != getattr(cfg, name)}
    if state.get("tokenizer") != data.tokenizer:
        changed["tokenizer"] = f"{state.get('tokenizer')} -> {data.tokenizer}"
    if not cfg.eval_only:
        if weights_of(saved["data"]) != weights_of(cfg.data):
            changed["data"] = f"{' '.join(saved['data'])} -> {' '.join(cfg.data)}"
        if not same_files(data.fingerprint, state["data"]):
            new = [f"{file[0]} ({file[1]:,} tokens)" for file in data.fingerprint
                   if not any(same_files([file], [old]) for old in state["data"])]
            changed["data"] = f"has changed: {', '.join(new) or 'its order'}"
    refused = [name for name in changed if name in weights or name not in cfg.allow_change]
    if refused:
        differences = ", ".join(f"{name} {changed[name]}" for name in refused)
        advice = f"To continue nevertheless: --allow_change {' '.join(refused)}"
        if set(refused) & set(weights):
            advice = "Its weights fit no other model; leave those flags out, or start a new run"
        raise ConfigError(f"{path}: this run differs from it: {differences}. {advice}")


def same_files(files: list, saved: list) -> bool:
    """Whether fingerprints agree in what both have; older ones have no sample of the content."""
    if len(files) != len(saved):
        return False
    return all(list(a[: len(b)]) == list(b[: len(a)]) for a, b in zip(files, saved, strict=True))


def weights_of(specs: list[str]) -> list:
    """The mixture weights of PATH[:WEIGHT] sources."""
    return [split_weight(spec)[1] for spec in specs]
