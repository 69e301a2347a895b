"""Checks for a card: that the program computes there what it computes on a CPU.

    python -m pytest -m gpu

`python -m tests.bench gpu` begins with them. The slow tests run most of them on the CPU.
"""

import os
import time

import pytest
import torch
from conftest import before, column, saved, tiny_config
from torch import nn

import train
from steady.checkpoints.writer import Writer
from steady.models.device import DTYPES, multiplies_bf16
from steady.tokens.packing import boundaries
from tools import generate

# so that matrix products are deterministic; read when CUDA is first used
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
on_each = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow),
                                             pytest.param("cuda", marks=GPU)])
MODEL = ["--n_head", "4", "--n_kv_head", "2", "--d_model", "64", "--d_ff", "128", "--seq_len",
         "64", "--batch_size", "8", "--max_steps", "20", "--log_interval", "1", "--no_tensorboard",
         "--eval_interval", "10", "--num_workers", "0"]
CPU = [*MODEL, "--device", "cpu", "--no_compile"]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def need(precision: str, device: str):
    if device == "cuda" and precision == "bf16" and not multiplies_bf16(torch.device(device)):
        pytest.skip("this card does not multiply bf16")


def same_curve(folder, one: str, other: str, tolerance: float):
    for name in ("train/loss", "val/loss"):
        expected, found = column(folder / one, name), column(folder / other, name)
        assert expected and expected.keys() == found.keys()
        assert [found[step] for step in expected] == pytest.approx(list(expected.values()),
                                                                   rel=tolerance), name
    norms = [column(folder / name, "train/grad_norm")[1] for name in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=tolerance)


@on_each
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision, tolerance", [("fp32", 2e-3), ("bf16", 0.03), ("fp16", 0.03)])
def test_losses_are_those_of_a_cpu_in_fp32(run, tmp_path, device, precision, tolerance, optimizer):
    need(precision, device)
    flags = ["--optimizer", optimizer, "--learning_rate", "2e-3"]
    run(*CPU, *flags, "--out_dir", "cpu")
    run(*CPU, *flags, "--device", device, "--precision", precision, "--out_dir", "device",
        "--micro_batch_size", "4")
    same_curve(tmp_path, "cpu", "device", tolerance)


@on_each
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resume_is_exact(run, deterministic, device, precision):
    need(precision, device)
    assert " values same" in run(*CPU, "--device", device, "--precision", precision, "--dropout",
                                  "0.1", "--verify_resume", "5")


@on_each
def test_a_checkpoint_is_of_one_step_although_training_goes_on(run, tmp_path, monkeypatch,
                                                               deterministic, device):
    # meanwhile the next step is made
    before(Writer, "write", lambda *_: time.sleep(0.05), monkeypatch.setattr)
    flags = [*CPU, "--device", device, "--keep_checkpoints", "20", "--eval_interval", "0"]
    run(*flags, "--save_interval", "1", "--out_dir", "often")
    run(*flags, "--save_interval", "8", "--out_dir", "once")
    for step in (8, 16):
        one, other = (saved(tmp_path / name, step)["model"] for name in ("often", "once"))
        for key in one:
            assert torch.equal(one[key], other[key]), (step, key)


@on_each
def test_text_is_that_of_the_cpu(run, tool, device):
    run(*CPU, "--device", device, "--max_steps", "60", "--learning_rate", "5e-3", "--out_dir", "r")
    texts = [tool(generate.main, "generate", "r", "--device", where, "--temperature", 0, "--prompt",
                  "1 + 2", "--max_new_tokens", 40).out for where in ("cpu", device)]
    assert texts[0] == texts[1] and len(texts[0]) > 40


@on_each
@pytest.mark.parametrize("how, precision, tolerance", [
    ("mask", "fp32", 1e-3), ("mask", "bf16", 0.06), ("varlen", "bf16", 0.06)])
def test_packed_documents_are_computed_as_if_alone(device, how, precision, tolerance):
    need(precision, device)
    if device == "cpu" and how != "mask":
        pytest.skip("kernels of a GPU")
    cfg = tiny_config(d_model=128, d_ff=352, n_head=4, n_kv_head=2, head_dim=32, seq_len=64)
    torch.manual_seed(0)
    model = train.Transformer(cfg)
    for p in model.parameters():  # as it is made, its blocks do nothing
        nn.init.normal_(p, std=0.1)
    tokens, targets = torch.randint(cfg.vocab_size, (2, 2, 64))
    lengths, documents, alone = [5, 30, 29], [], []
    for i, length in enumerate(lengths):
        documents += [i] * length
        part = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
        alone.append(model(tokens[:, part], targets[:, part]))  # on the CPU, in fp32
    expected = torch.cat(alone, 1)
    expected.mean().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.to(device)
    dtype, numbers = DTYPES[precision], torch.tensor([documents] * 2)
    where = boundaries(numbers) if how == "varlen" else numbers
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        found = model(tokens.to(device), targets.to(device), where.to(device))
        found.mean().backward()
    close = dict(rtol=tolerance, atol=tolerance * float(expected.detach().mean()))
    torch.testing.assert_close(found.cpu().float(), expected, **close)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad.cpu() - gradient).norm() / gradient.norm() < 2 * tolerance, p.shape


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])  # minutes on a CPU
@pytest.mark.parametrize("flags", [
    [], ["--data_mode", "packed"], ["--activation_checkpointing", "full"],
], ids=["stream", "packing", "recomputed"])
def test_compiled_it_is_the_same(run, tmp_path, device, flags):
    flags = [*flags, *CPU, "--device", device, "--max_steps", "8", "--eval_interval", "4"]
    run(*flags, "--out_dir", "eager")
    run(*flags, "--out_dir", "compiled", "--compile")
    same_curve(tmp_path, "eager", "compiled", 2e-3)
