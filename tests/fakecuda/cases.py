"""The program on the fake device: run by tests/test_fakecuda.py, which provides it.

What a step does not copy and wait for is compared exactly, so a new `.item()` in the loop fails.
"""

import ctypes
import importlib
import json
import re
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import TINY, after, after_step, column, python, rows
from fakecuda.watch import COUNTERS, watch

SMALL = [*TINY, "--device", "cuda", "--no_compile", "--precision", "bf16", "--num_workers", "0",
         "--no_tensorboard", "--eval_interval", "0", "--save_interval", "0"]
BATCH = "from host data.py <genexpr>"  # page-locked, so nothing waits for it
PAGEABLE_BATCH = "from pageable host data.py <genexpr>"
LOG = {
    "to pageable host steady/watch/gather.py on_host": 1,
    "synchronize steady/watch/gather.py on_host": 1,
    "synchronize steady/watch/clock.py phase": 1}  # what is queued belongs to the steps
GUARD = {  # skipped steps in a row, at each log but that of a first step
    "to host steady/guard/guard.py check": 1,
    "synchronize steady/guard/guard.py check": 1}
READ = LOG | GUARD
SPIKES = {  # with --skip_spikes, at each log
    "to pageable host steady/guard/guard.py take": 1,
    "synchronize steady/guard/guard.py take": 1}
REPLICAS = {"to pageable host steady/ranks/replicas.py compare_replicas": 1,
            "synchronize steady/ranks/replicas.py compare_replicas": 1}
PHASE = "synchronize steady/watch/clock.py phase"
EVALUATION = {PHASE: 1, "to pageable host steady/models/evaluation.py row": 1,
              "synchronize steady/models/evaluation.py row": 1}
SAMPLE = {PHASE: 1, "from pageable host train.py sample": 1, "synchronize train.py sample": 3,
          "to host train.py sample": 1, "to pageable host train.py sample": 1,
          "to host model.py generate": 1, "synchronize model.py generate": 1}  # do caches work?
SAVE = {PHASE: 1}  # and copies to page-locked memory, which the next update waits for
SAVED = {"synchronize steady/checkpoints/writer.py finish_copy": 1}  # its copy has ended
COPIED = "to host steady/checkpoints/writer.py copy_to_host"
# torch 2.15's _foreach_norm copies where the partial sums of each tensor begin from page-locked
# memory, in the stream of its kernels: nothing waits for it.
OFFSETS = ("from host steady/ranks/parallel.py norms",
           "from host steady/checkpoints/writer.py save")


@pytest.fixture
def go(run, tmp_path):
    """go(*flags) → (printed, steps): a run in tmp_path with SMALL and the corpus.

    steps[n]: the transfers and waits between host and device in step n, {kind and function: times}.
    ranks: processes; steps are those of rank 0. hook: called first in each. memory: bytes of the
    device.
    """

    def go(*flags, bare=False, ranks=1, hook=None, memory=80 * 10**9, expect=0):
        flags = flags if bare else [*SMALL, *flags]
        found = [tmp_path / f"steps{rank}.json" for rank in range(ranks)]

        def prepare(rank):
            if hook:
                hook()
            watch(found[rank], memory)

        printed = run(*flags, bare=bare, ranks=ranks, hook=prepare, expect=expect)
        return printed, {int(step): without_lines(counts)
                         for step, counts in json.loads(found[0].read_text()).items()}

    return go


def without_lines(counts: dict) -> dict:
    """{"kind file:line function": times} without the lines, added up."""
    out = {}
    for name, n in counts.items():
        name = re.sub(r":\d+ ", " ", name)
        out[name] = out.get(name, 0) + n
    return out


def transfers(counts: dict) -> dict:
    return {name: n for name, n in counts.items() if name not in (*COUNTERS, *OFFSETS)}


def total(*parts: dict) -> dict:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def check(steps: dict, logs: list[int], micro_batches: int = 1, tensors: int = 1, more=LOG):
    """Ordinary steps copy their batches, each of so many tensors, from page-locked memory; a log
    adds more. One micro-batch is read ahead, in the first step; the last one also ends the run."""
    last = max(steps)
    for step, counts in steps.items():
        if step in (0, last):
            continue
        expected = {BATCH: tensors * (micro_batches + (step == 1))}
        read = total(more if step in logs else {}, GUARD if step in logs and step > 1 else {})
        assert transfers(counts) == total(expected, read), step
        assert not counts.get("frees") or step == 1, step


@pytest.mark.parametrize("flags", [
    [],
    ["--precision", "fp32"],
    ["--precision", "fp16", "--monitoring", "full"],
    ["--precision", "fp16", "--optimizer", "adamw"],
    ["--grad_clip", "0", "--optimizer", "adamw", "--precision", "fp32", "--monitoring", "off"],
    ["--dropout", "0.1", "--activation_checkpointing", "full"],
    ["--attention", "efficient", "--n_kv_head", "2", "--skip_spikes", "6"],
    ["--attention", "cudnn", "--n_kv_head", "2", "--check_replicas_interval", "3"],
    ["--qk_norm", "--qkv_bias", "--tie_embeddings", "--monitoring", "full", "--num_workers", "2"],
    ["--deterministic", "--monitoring", "full", "--ema", "0.9"],
    ["--deterministic", "--optimizer", "adamw", "--attention", "efficient", "--precision", "fp16"],
    ["--micro_batch_size", "2"],
    ["--preset", "max_throughput"],
    ["--preset", "low_memory"],
], ids=" ".join)
def test_an_ordinary_step_waits_for_nothing(go, flags):
    _, steps = go(*flags)
    micro_batches = 4 if "--micro_batch_size" in flags else 8 if "low_memory" in flags else 1
    check(steps, [1, 4, 8], micro_batches, more=LOG | SPIKES if "--skip_spikes" in flags else LOG)
    assert sorted(steps) == list(range(13))


def test_the_benchmark_survives_a_card_that_computes_nonsense(tmp_path):
    """Checks fail, times are of nothing: the file is written all the same."""
    code = """if True:
        import sys
        from tests.bench import __main__, gpu
        gpu.PROGRAMME[1] = {name: gpu.STEPS[name] for name in ("checks", "peaks")}
        gpu.LIMIT = gpu.MOST["peaks"] = 10_000  # a busy machine is no fault
        gpu.MOST["checks"] = 25
        sys.exit(__main__.main(["gpu", "--quick"]))"""
    python("-c", code, folder=tmp_path)
    found = json.loads((tmp_path / "gpu-nvidia-h100-80gb-hbm3-1.json").read_text())
    assert list(found["outcomes"]) == ["checks", "peaks"]
    what = {figure["what"]: figure["ratios"][0] for figure in found["figures"]}
    assert "product of matrices" in what and what.get("checks: pytest -m gpu", 0) == 0


def ask_in_each_step():
    import train

    torch.profiler.profile = lambda activities: Mock()  # CUPTI does not survive the fake driver
    update = train.update

    def asking(*args):
        loss, norm = update(*args)
        norm.item()
        return loss, norm

    train.update = asking
    warnings.showwarning = lambda message, kind, file, *_: print(Path(file).name, message)


def test_an_item_in_the_loop_is_found(go):
    """Also by a trace."""
    printed, steps = go("--trace", "5", hook=ask_in_each_step)
    assert "cases.py called a synchronizing CUDA operation" in printed
    assert "a trace of 3 steps is in" in printed
    with pytest.raises(AssertionError):
        check(steps, logs=[1, 4, 8])
    assert [step for step in steps if "synchronize train.py train" in steps[step]] == [
        *range(1, 13)]


def test_documents(go):
    """Tokens and targets are copied from page-locked memory; rows are padded."""
    printed, steps = go("--data_mode", "documents")
    check(steps, logs=[1, 4, 8], tensors=2)
    assert "bf16, flash attention" in printed and not any(c.get("cudnn") for c in steps.values())


VARLEN = "bf16, varlen flash attention"
LAYERS = 2
EFFICIENT = ["--n_kv_head", "2"]  # torch 2.11 computes grouped queries with a mask by formula
importlib.import_module("torch.nn.attention.varlen")  # takes seconds: not in each run


def flash_kernels(counts: dict) -> tuple[int, int]:
    return counts.get("flash_forward", 0), counts.get("flash_backward", 0)


@pytest.mark.parametrize("flags, attention", [
    ([], VARLEN),
    (["--precision", "fp16"], "fp16, varlen flash attention"),
    (["--attention", "flash", "--n_head", "4", "--n_kv_head", "2", "--qk_norm"], VARLEN),
    (["--activation_checkpointing", "full", "--num_workers", "2"], VARLEN),
    (["--precision", "fp32", *EFFICIENT], "fp32, efficient attention"),
    (["--dropout", "0.1", *EFFICIENT], "bf16, efficient attention"),
    (["--head_dim", "12"], "bf16, math attention"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_packing(go, flags, attention):
    """Numbers of documents, or where these begin, come with the tokens from page-locked memory."""
    printed, steps = go("--data_mode", "packed", *flags)
    assert attention in printed
    check(steps, logs=[1, 4, 8], tensors=3)
    passes = 2 if "full" in flags else 1
    expected = (LAYERS * passes, LAYERS) if "varlen" in attention else (0, 0)
    assert {flash_kernels(steps[step]) for step in range(1, 12)} == {expected}


def targets_count():
    """A hook: as what comes from the device is zeros, an evaluation has counted nothing."""
    import train

    plain = train.Means.row

    def row(self, *how, **more):
        plain(self, *how, **more)
        return {"val/loss": 1.0, "val/loss_ema": 1.0}, ""

    train.Means.row = row


def test_evaluation_and_health_of_packed_rows(go):
    _, steps = go("--data_mode", "packed", "--eval_interval", "3", "--monitoring", "full",
                  hook=targets_count)
    assert transfers(steps[2]) == {BATCH: 3}
    found = transfers(steps[3])
    del found[COPIED]  # a new best is saved
    n = found.pop(PAGEABLE_BATCH)
    assert found == total({BATCH: 3}, EVALUATION, SAVE) and n % 3 == 0
    assert flash_kernels(steps[3]) == (LAYERS * (1 + n // 3), LAYERS)
    assert transfers(steps[4]) == total({BATCH: 3}, READ, SAVED)
    assert flash_kernels(steps[4]) == (2 * LAYERS, LAYERS)  # one more for the output


def test_packed_rows_of_two_ranks(go):
    printed, steps = go("--data_mode", "packed", "--parallel", "zero3",
                        "--activation_checkpointing", "full", ranks=2, hook=no_comparison)
    assert VARLEN in printed
    assert [waited(steps[step]) for step in (2, 3, 8, 9)] == [{}, {}, READ, {}]


def test_a_mixture(go, corpus):
    other = corpus.parent / "other"
    if not other.exists():
        other.symlink_to(corpus)
    _, steps = go("--data", f"{corpus}:3", f"{other}:1")
    check(steps, logs=[1, 4, 8], tensors=2)  # tokens, and which dataset


@pytest.mark.parametrize("flags", [
    ["--model", "gpt2-124m", "--batch_size", "16", "--micro_batch_size", "8"],
    ["--model", "350m", "--batch_size", "2", "--activation_checkpointing", "full"],
], ids=" ".join)
def test_large_models(go, corpus, tmp_path, flags):
    """Of torch's own allocator, so as on a GPU: the memory that a step takes."""
    printed, steps = go(
        *flags, "--data", corpus, "--seq_len", "512", "--device", "cuda", "--no_compile",
        "--max_steps", "4", "--log_interval", "1", "--eval_interval", "0", "--save_interval", "0",
        "--no_tensorboard", "--num_workers", "0",
        "--out_dir", tmp_path / "r", bare=True)
    assert "bf16, cudnn attention" in printed
    assert 1 < max(column(tmp_path / "r", "memory/peak_gb").values()) < 20


def test_evaluation_sample_and_checkpoint(go, tmp_path):
    _, steps = go("--eval_interval", "3", "--eval_steps", "2", "--sample_interval", "5",
                  "--save_interval", "7", "--out_dir", tmp_path / "r", hook=targets_count)
    found = {step: transfers(counts) for step, counts in steps.items()}
    assert found[2] == {BATCH: 1}
    copies = found[3].pop(COPIED) // 2  # saved before the evaluation; the new best after it
    assert found[3] == total({BATCH: 1, PAGEABLE_BATCH: 2}, SAVE, EVALUATION, SAVE)
    assert found[5] == total({BATCH: 1}, SAVE, {COPIED: copies}, SAMPLE)
    assert found[7] == total({BATCH: 1}, SAVED, SAVE, {COPIED: copies})
    assert found[8] == total({BATCH: 1}, SAVED, READ)
    assert steps[2]["cudnn"] == LAYERS and steps[5]["cudnn"] == LAYERS  # none for the sample


def test_averages(go, tmp_path):
    """Evaluated, sampled from, saved and resumed as the weights are."""
    flags = ["--ema", "0.9", "--sample_interval", "5", "--save_interval", "7", "--out_dir",
             tmp_path / "r"]
    _, steps = go(*flags, "--eval_interval", "3", hook=targets_count)
    found = {step: transfers(counts) for step, counts in steps.items()}
    saved = [found[step].pop(COPIED) for step in (3, 7)]
    assert saved[0] == 2 * saved[1]  # before the evaluation, and the new best
    assert found[2] == {BATCH: 1}
    # the averages take the place of the weights once these are copied
    assert found[3] == total({BATCH: 1, PAGEABLE_BATCH: 4}, SAVE, SAVED, EVALUATION, SAVE)
    assert found[5] == total({BATCH: 1}, SAVE, SAVED, {COPIED: saved[1]}, SAMPLE)
    assert found[7] == total({BATCH: 1}, SAVE)
    go(*flags, "--auto-resume", "--max_steps", "14")


def test_the_clock_ends_a_run(go, corpus):
    """Steps in flight count: it waits for the device where it measures, and at no other step."""
    def hook():
        deadline = importlib.import_module("steady.guard.deadline")
        deadline.SETTING_STEP, deadline.EARLIER_STEPS = 8, ()

    flags = [*SMALL, "--data", corpus, "--max_minutes", "0.1", "--cache_clear_interval", "0"]
    at = flags.index("--max_steps")
    printed, steps = go(*flags[:at], *flags[at + 2 :], "--log_interval", "10000", bare=True,
                        hook=hook)
    assert re.search(r"step \d+: \d+ steps fit into --max_minutes 0.1", printed)
    measured = "synchronize steady/guard/deadline.py set_max_steps"
    assert [step for step, counts in steps.items() if counts.pop(measured, 0)] == [1, 8]
    check(steps, logs=[1])


def test_resuming_evaluating_and_generating(go, tmp_path):
    out = ["--out_dir", tmp_path / "r", "--save_interval", "4"]
    go(*out, "--max_steps", "8", "--precision", "fp16")
    printed, steps = go(*out, "--auto-resume", "--precision", "fp16")
    assert "step_00000008.pt" in printed
    check({step: counts for step, counts in steps.items() if step > 9}, logs=[])
    printed, _ = go("--check_checkpoints", tmp_path / "r", bare=True)
    assert "INVALID" not in printed and printed.count("valid") >= 3
    newest = tmp_path / "r/checkpoints/step_00000012.pt"
    go("--eval_only", "--resume", newest)
    go("--init_from", "none", "--resume", newest, "--skip_spikes", "4", "--max_steps", "14")


def test_text_from_a_checkpoint(go, tmp_path):
    go("--out_dir", tmp_path / "r", "--save_interval", "12")

    def hook():
        import train
        from tools import generate

        train.main = generate.main

    _, steps = go("generate", tmp_path / "r", "--device", "cuda", bare=True, hook=hook)
    # every token is printed, and asked whether it is the last: here, each of them is
    found = steps[0]
    assert found["synchronize tools/generate.py add"] == 1
    assert found["synchronize model.py generate"] == 2, found


def test_rolling_back(go, tmp_path):
    def hook():
        from steady.guard import guard

        def fail(_, step):
            if step == 8 and not (tmp_path / "rolled").exists():
                (tmp_path / "rolled").touch()
                raise guard.NotFinite("planted")

        after(guard.Guard, "check", fail)

    printed, steps = go("--save_interval", "6", "--on_nonfinite", "rollback", hook=hook)
    assert "step_00000006.pt, continuing at sample 64" in printed


def test_out_of_memory(go, corpus):
    big = ["--d_model", "512", "--n_head", "8", "--seq_len", "512", "--batch_size", "64"]
    printed, _ = go(*big, "--micro_batch_size", "64", memory=10**9, expect=1)
    assert "out of memory: " in printed and "try --micro_batch_size 32" in printed


def test_a_device_that_fails(go, tmp_path):
    """Every call raises from then on; the monitor ends the files of the run all the same."""
    printed, _ = go("--out_dir", tmp_path / "r", expect=1, hook=lambda: after_step(
        7, lambda: ctypes.CDLL(None).fake_fail(710)))
    assert "failed: AcceleratorError: CUDA error" in printed and printed.count("Traceback") == 1
    assert "seconds" in rows(tmp_path / "r")[-1]


def no_comparison():
    """DDP compares the shapes of parameters over the ranks, whose exchange brings zeros here."""
    from torch.nn.parallel import distributed

    distributed._verify_param_shape_across_processes = lambda *_: None


@pytest.mark.parametrize("way", ["ddp", "zero2"])
def test_two_ranks(go, tmp_path, way):
    """torch's own DDP and fully_shard call a NCCL that moves nothing; gloo is real."""
    flags = ["--parallel", way, "--out_dir", tmp_path / "r", "--save_interval", "5",
             "--eval_interval", "6", "--monitoring", "full", "--check_replicas_interval", "3",
             "--skip_spikes", "6", "--micro_batch_size", "2", "--ema", "0.9"]
    steps = go(*flags, ranks=2, hook=no_comparison)[1]
    if way != "ddp":  # which waits in its first steps
        assert {step: waited(steps[step]) for step in (2, 3, 7, 8, 9, 11)} == {
            2: {}, 3: REPLICAS, 7: {}, 8: READ | SPIKES, 9: REPLICAS, 11: SAVED}
    printed, _ = go(*flags, "--auto-resume", "--max_steps", "14", ranks=2, hook=no_comparison)
    assert "step_00000012" in printed


def test_ddp_waits_in_its_first_steps_alone(go):
    """torch times the first 10 steps, and would time every 100th."""
    steps = go("--max_steps", "104", "--log_interval", "50", ranks=2, hook=no_comparison)[1]
    later = {step: waited(counts) for step, counts in steps.items() if 12 < step < 104}
    assert later == {step: READ if step in (50, 100) else {} for step in later}


def waited(counts: dict) -> dict:
    """But for copies from page-locked memory, as fully_shard makes some of its own."""
    return {name: n for name, n in transfers(counts).items() if not name.startswith("from host")}


def compile_quickly():
    """Each kernel once."""
    import torch._inductor.config

    torch._inductor.config.triton.autotune_pointwise = False


@pytest.mark.parametrize("flags", [
    ["--micro_batch_size", "2", "--monitoring", "full", "--ema", "0.9"],
    ["--data_mode", "packed"],
], ids=" ".join)
def test_compiled(go, flags):
    """One graph for training and one for evaluation, whose last batch is not full; no breaks.

    Two of Muon for each shape of a matrix, at whatever learning rate.
    """
    _, steps = go(*flags, "--compile", "--n_layer", "1", "--eval_interval", "5", "--eval_steps",
                  "0", "--sample_interval", "0", hook=compile_quickly)
    graphs = {step: counts.get("graphs", 0) for step, counts in steps.items()}
    assert {step: n for step, n in graphs.items() if n} == {1: 1 + 2 * 4, 5: 1}
    assert not any(counts.get("graph breaks") for counts in steps.values())
    ordinary = {step: counts for step, counts in steps.items() if step > 1 and step % 5}
    check(ordinary, logs=[4, 8], micro_batches=4 if "2" in flags else 1,
          tensors=3 if "packed" in flags else 1)


def test_compiled_on_two_ranks(go):
    """One graph for all blocks, one for the loss; Muon's steps too, of some rows."""
    steps = go("--parallel", "zero3", "--compile", "--n_layer", "3", "--max_steps", "6",
               "--sample_interval", "0", ranks=2,
               hook=lambda: [no_comparison(), compile_quickly()])[1]
    assert {step: counts["graphs"] for step, counts in steps.items() if counts.get("graphs")} == {
        1: 2 + 2 * 4}
    assert not any(counts.get("graph breaks") for counts in steps.values())
    assert [waited(steps[step]) for step in (2, 3, 4, 5)] == [{}, {}, READ, {}]
