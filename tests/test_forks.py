"""Nine forks that people make: each applied as text, trained, killed and resumed bit for bit.

Nothing in a fork deals with checkpoints. How long they are is what docs/hacking.md says.
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, after, assert_same_end, column, free_port, in_clone, poison, tiny_config
from test_readme import HACKING, RECIPES, WITH_PAIRS, apply, blocks, copy_files, run_in

import model
from steady.checkpoints.checkpoint import Checkpoint
from steady.tokens import packing
from tools import generate, prepare

FLAGS = [*TINY, "--max_steps", "30", "--save_interval", "10", "--eval_interval", "15",
         "--sample_interval", "0"]
GUARDED = [*TINY, "--log_interval", 2, "--save_interval", 4, "--eval_interval", 6,
           "--max_nonfinite", 2, "--skip_spikes", 6, "--sample_interval", 0]

LION = '''    return [Lion([dict(params=list(trained.values()), lr_scale=0.1)], cfg.learning_rate)]


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675."""

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * m.lerp(p.grad, 0.1).sign())
                m.lerp_(p.grad, 0.01)
'''

MASKED = '''    return Masked(datasets, seed, vocab_size)


class Masked(Mixture):
    """Five tokens of each sample are masked, and are all that the loss counts."""

    def __init__(self, *args):
        super().__init__(*args)
        self.vocab_size = 258  # the last id is the mask

    def batch(self, start: int, stop: int) -> Batch:
        tokens = super().batch(start, stop).tokens[:, :-1].long()
        targets = torch.full_like(tokens, IGNORE)
        for row, position in enumerate(range(start, stop)):
            draw = torch.Generator().manual_seed(position)
            at = torch.randperm(tokens.shape[1], generator=draw)[:5]
            targets[row, at], tokens[row, at] = tokens[row, at], self.vocab_size - 1
        return Batch(tokens, targets)
'''

DISTILLED = '''        if self.training:
            logits = self.head(self.hidden(tokens, documents=documents))
            losses = layers.cross_entropies(logits, targets)
            with torch.no_grad():
                wanted = self.teacher(tokens, documents=documents).log_softmax(-1)
            soft = F.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True)
            return 0.5 * losses + 0.5 * soft.sum(-1) * (targets != layers.IGNORE)
        return self.head(self.hidden(tokens, documents=documents), targets)
'''

MATRICES = '''\
    matrices = [dict(params=[p for name, p in trained.items() if kinds[name] == "matrix"],
                     weight_decay=cfg.weight_decay)]
'''

BY_LAYER = '''    matrices = [dict(params=[p for name, p in trained.items()
                             if kinds[name] == "matrix" and name.startswith(f"blocks.{i}.")],
                     weight_decay=cfg.weight_decay, lr_scale=0.8 ** (cfg.n_layer - 1 - i))
                for i in range(cfg.n_layer)]
'''

TEACHER = '''    from tools.generate import open_model
    model.__dict__["teacher"] = open_model(Path("teacher"))[0].to(device).eval()
    return model
'''

FORKS = {  # name → [(file, text, its replacement)]
    "z-loss": RECIPES["loss"],
    "a sliding window": RECIPES["attention"],
    "Lion": [("train.py", "    return optimizers\n", LION)],
    "masked modelling": [
        ("data.py", "    return Mixture(datasets, seed, vocab_size)\n", MASKED),
        ("model.py", "causal=causal", "causal=False")],
    "distillation": [
        ("model.py", RECIPES["loss"][0][1], DISTILLED),
        ("train.py", "    return model\n", TEACHER)],
    "generated data": RECIPES["Generated data"],
    "rates by layer": [("train.py", MATRICES, BY_LAYER)],
    "preference tuning": RECIPES[WITH_PAIRS],
    "no monitor": []}


def fork(name: str, clone: Path) -> tuple[int, int]:
    """Change the copy; returns (lines that are new or gone, files)."""
    changed = {}
    apply(FORKS[name], clone)
    for file, old, new in FORKS[name]:
        ours = set(new.splitlines()) ^ set(old.splitlines())
        changed[file] = changed.get(file, 0) + len(ours - {""})
    if name == "no monitor":
        lines = (clone / "train.py").read_text().splitlines(keepends=True)
        kept = [line for line in lines if "monitor" not in line]
        (clone / "train.py").write_text("".join(kept))
        changed["train.py"] = len(lines) - len(kept)
    return sum(changed.values()), len(changed)


def go(clone: Path, corpus: Path, out: str, *flags, kill_at: str = ""):
    """Run train.py in `clone`; kill_at: as a file is about to get this name."""
    def audit(event: str, args):
        if kill_at and event == "os.rename" and str(args[1]).endswith(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    run_in(clone, *FLAGS, "--data", corpus, "--out_dir", out, *flags, expect=-9 if kill_at else 0,
           before=lambda: sys.addaudithook(audit))


def changed(name: str, monkeypatch, file: str = "model.py") -> types.ModuleType:
    text = (Path(__file__).parents[1] / file).read_text()
    for of, old, new in FORKS.get(name) or RECIPES[name]:
        text = text.replace(old, new) if of == file else text
    module = types.ModuleType("changed")
    monkeypatch.setitem(sys.modules, "changed", module)
    exec(text, vars(module))
    return module


def test_a_window_holds_in_packed_rows_too(monkeypatch):
    """And one that boundaries would hide, as on CUDA, is refused."""
    net = changed("a sliding window", monkeypatch).Transformer(tiny_config(n_layer=1)).eval()
    torch.nn.init.normal_(net.blocks[0].attention.out.weight)
    tokens, packed = torch.arange(24)[None], torch.tensor([[0] * 4 + [1] * 20])
    for documents, reached in ((None, {0: 15, 3: 18, 4: 19, 15: 23}),
                               (packed, {0: 3, 3: 3, 4: 19, 15: 23})):
        before = net(tokens, documents=documents)
        for first, last in reached.items():
            after = net(tokens + (tokens == first), documents=documents)
            assert (after != before).any(-1)[0].nonzero()[-1] == last, (documents, first)
    with pytest.raises(TypeError, match="takes_boundaries = False"):
        net(tokens, documents=packing.boundaries(packed))


def test_a_second_target_is_of_the_same_document(monkeypatch):
    net = changed("A second target", monkeypatch).Transformer(tiny_config(n_layer=1)).train()
    torch.nn.init.normal_(net.head.weight)
    numbers = torch.tensor([[0] * 4 + [1] * 20, [0] * 10 + [1] * 14])
    tokens, targets = torch.randint(0, 257, (2, 2, 24), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(net, "hidden", lambda tokens, documents: net.norm(net.embedding(tokens)))
    for documents in (numbers, packing.boundaries(numbers)):
        before = net(tokens, targets, documents)
        for row, first in ((0, 4), (1, 10)):  # of the second document
            other = targets.clone()
            other[row, first : first + 2] += 1 - 2 * (other[row, first : first + 2] > 0)
            differs = (net(tokens, other, documents) != before).nonzero().tolist()
            assert differs == [[row, first], [row, first + 1]]


def test_an_auxiliary_loss_is_the_same_in_any_micro_batches(monkeypatch):
    net = changed("A scalar auxiliary loss", monkeypatch).Transformer(tiny_config(n_layer=1))
    torch.nn.init.normal_(net.norm.weight, std=100)  # else all tokens have the same mean square
    tokens = torch.arange(96).view(4, 24)
    batch = torch.stack((tokens, tokens.masked_fill(tokens < 30, model.layers.IGNORE)))
    halves = [net(*half).sum() for half in batch.split(2, dim=1)]
    torch.testing.assert_close(sum(halves), net(*batch).sum(), rtol=1e-5, atol=0)


def two_ranks(clone: Path, flags: list) -> list[int]:
    port = free_port()
    group = [in_clone(clone, flags, rank=rank, ranks=2, port=port) for rank in (0, 1)]
    return [process.code() for process in group]


@pytest.mark.slow
def test_a_second_backward_pass_is_shared_by_all_ranks_or_refused(tmp_path, corpus):
    flags = [*FLAGS, "--data", corpus, "--out_dir", "r", "--overwrite", "--max_steps", 4,
             "--micro_batch_size", 2]
    clone = copy_files(tmp_path / "clone")
    text = (clone / "train.py").read_text()
    apply(RECIPES["A second backward pass"], clone)
    for way in ("ddp", "zero2"):
        assert two_ranks(clone, [*flags, "--parallel", way]) == [0, 0]
    here = '        monitor.phase("optimizer")\n'
    late = "        run.model(*batch[:3]).sum().backward()\n"
    (clone / "train.py").write_text(text.replace(here, late + here))
    assert two_ranks(clone, flags) == [1, 1]
    assert "a backward pass beside run.ddp" in (clone / "log.txt").read_text()


SUMS = [dict(prompt=f"{a} + {b} = ", chosen=f"{a + b}\n", rejected=f"{a} or {b}, or {a + b + 1}\n")
        for a, b in zip(range(24), range(3, 60), strict=False)]


def preferences(clone: Path, corpus: Path) -> list:
    """Make a base model, and pairs as the page says; the flags to train with both."""
    flags = ["--seq_len", 64, "--learning_rate", 3e-3]
    go(clone, corpus, "sft", *flags)
    assert generate.main(["export", str(clone / "sft"), str(clone / "base")]) == 0
    code, command = blocks(HACKING.split(f"## {WITH_PAIRS}")[1], "python", "bash")[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        Path("preferences.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
        exec(code, {})
        argv = shlex.split(command.splitlines()[0].replace("Qwen/Qwen3-0.6B", "base"))
        assert prepare.main(argv[2:]) == 0
    return [*flags, "--init_from", "base", "--data", "pairs", "--val_data", "pairs/train.bin"]


def log_p(net, prompt: str, answer: str) -> torch.Tensor:
    """The log-probability of an answer and the end of text after it."""
    ids = torch.tensor([*prompt.encode(), *answer.encode(), 256])
    logits = net.head(net.hidden(ids[None, :-1]))[0]
    return logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]][len(prompt) - 1 :].sum()


@pytest.mark.slow
def test_preference_tuning_is_dpo(tmp_path, corpus, monkeypatch):
    """Equation 7 of arXiv:2305.18290, on any number of ranks; the reference is not saved."""
    clone = copy_files(tmp_path / "clone")
    flags = [*FLAGS, *preferences(clone, corpus), "--eval_steps", 0, "--log_interval", 1,
             "--max_steps", 12, "--save_interval", 0]
    fork("preference tuning", clone)
    go(clone, corpus, "one", *flags)
    assert two_ranks(clone, [*flags, "--micro_batch_size", 2, "--out_dir", "two"]) == [0, 0]
    one, two = (column(clone / out, "train/loss") for out in ("one", "two"))
    assert one[1] == pytest.approx(math.log(2), abs=1e-6) and two == pytest.approx(one, rel=1e-3)
    one, two = (column(clone / out, "train/reward_accuracy") for out in ("one", "two"))
    assert one == two and one[12] == 1 and {share * 8 % 1 for share in one.values()} == {0}

    reference, _, _ = generate.open_model(clone / "base")
    policy = changed(WITH_PAIRS, monkeypatch).Transformer(tiny_config(seq_len=64))
    policy.load_state_dict(Checkpoint(clone / "one/checkpoints/step_00000012.pt").state()["model"])
    policy.__dict__["reference"] = reference
    expected = 0.0
    for pair in SUMS:
        chosen, rejected = (log_p(policy, pair["prompt"], pair[answer]) -
                            log_p(reference, pair["prompt"], pair[answer]).detach()
                            for answer in ("chosen", "rejected"))
        expected -= F.logsigmoid(0.1 * chosen - 0.1 * rejected) / len(SUMS)
    assert column(clone / "one", "val/loss")[12] == pytest.approx(expected.item(), rel=1e-5)

    data = changed(WITH_PAIRS, monkeypatch, "data.py").load_mixture([str(clone / "pairs")], "train",
                                                                    64, seed=0)
    batch = data.rows(0, len(SUMS) + 1, len(SUMS)).to(torch.device("cpu"), len(SUMS))
    losses = policy(batch.tokens, batch.targets, batch.documents)
    weights = [*policy.parameters()]
    grads = torch.autograd.grad(losses.sum() / len(SUMS), weights)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, weights), rtol=1e-4, atol=1e-6)


def test_a_fork_without_tools_but_with_names_of_our_adapters_resumes(tmp_path, corpus):
    clone = copy_files(tmp_path / "clone")
    shutil.rmtree(clone / "tools")
    adapted = '''    model.requires_grad_(False).base = nn.ParameterDict({"A": torch.ones(1)})
    model.norm.lora = model.base
    model.norm.register_forward_hook(lambda norm, _, y: y * norm.lora["A"])
    return model
'''
    apply([("train.py", "    return model\n", adapted)], clone)
    go(clone, corpus, "r", "--max_steps", 10, "--optimizer", "adamw")
    go(clone, corpus, "r", "--max_steps", 20, "--auto_resume")
    assert max(column(clone / "r", "train/loss")) == 20
    assert "head.weight" in Checkpoint(clone / "r/checkpoints/step_00000020.pt").state()["model"]


def test_weights_that_only_init_sets_are_refused_by_name(run, monkeypatch):
    """Of a model that is built on the meta device."""
    after(model.FeedForward, "__init__", lambda net, cfg: setattr(
        net, "scale", torch.nn.Parameter(torch.ones(cfg.d_ff))), monkeypatch.setattr)
    for flags, how in (([], {}), (["--parallel", "zero3"], dict(ranks=2))):
        assert "init_weights: does not set blocks.0.mlp.scale and " in run(*flags, expect=2, **how)


@pytest.mark.slow
def test_experts_go_to_muon_and_decay(run, tmp_path, monkeypatch):
    """Sharded as whole, where not each rank has one; kernels of convolutions do not."""
    class Experts(model.FeedForward):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.experts = torch.nn.Parameter(torch.empty(3, cfg.d_model, cfg.d_model))
            self.register_buffer("mask", torch.empty(3))
            self.mix = torch.nn.Conv1d(cfg.d_model, cfg.d_model, 3, groups=8, padding=1, bias=False)

        def forward(self, x):
            y = torch.einsum("btc,ecd->btd", x, self.experts)
            return super().forward(x) + y + self.mix(x.mT).mT

    def init_experts(net):
        for block in net.blocks:
            torch.nn.init.normal_(block.mlp.experts, std=0.1)
            block.mlp.mask.fill_(-math.inf)  # which is a finite model all the same
            torch.nn.init.normal_(block.mlp.mix.weight, std=0.1)

    monkeypatch.setattr(model, "FeedForward", Experts)
    after(model.Transformer, "init_weights", init_experts, monkeypatch.setattr)
    flags = ["--max_steps", 6, "--grad_clip", 0, "--log_interval", 1]
    run(*flags, "--out_dir", "one")
    state = Checkpoint(tmp_path / "one/checkpoints/step_00000006.pt").state()
    muon, adamw = state["optimizer_names"]
    assert state["optimizers"][0]["param_groups"][0]["weight_decay"] == 0.1
    assert "blocks.0.mlp.experts" in muon and "blocks.0.mlp.experts" not in adamw
    assert {"blocks.0.mlp.mix.weight", "embedding.weight"} <= set(adamw)
    run(*flags, "--out_dir", "zero3", "--parallel", "zero3", ranks=4)
    one, zero3 = (column(tmp_path / out, "train/loss") for out in ("one", "zero3"))
    assert one == pytest.approx(zero3, rel=1e-4) and max(one) == 6


def test_forks_are_as_short_as_the_page_says(tmp_path):
    for name in FORKS:
        lines, files = fork(name, copy_files(tmp_path / name))
        assert f"\n| {name} | {lines} | {files} | " in HACKING


@pytest.mark.slow
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_trains_and_resumes_bit_for_bit(tmp_path, corpus, name):
    clone = copy_files(tmp_path / "clone")
    flags = preferences(clone, corpus) if name == "preference tuning" else []
    if name == "distillation":
        go(clone, corpus, "teacher")
    fork(name, clone)
    go(clone, corpus, "whole", *flags)
    go(clone, corpus, "killed", *flags, kill_at="step_00000020.pt")
    go(clone, corpus, "killed", *flags, "--auto_resume")
    assert_same_end(clone / "whole", clone / "killed", step=30)


def test_without_the_monitor_it_trains_saves_and_resumes(tmp_path, run, corpus):
    """Nor does the guard hang on it."""
    clone = copy_files(tmp_path / "clone")
    fork("no monitor", clone)
    assert "monitor" not in (clone / "train.py").read_text()
    flags = ["--data", corpus, "--out_dir", "bare", "--json"]
    told = json.loads(run_in(clone, *GUARDED, *flags).splitlines()[-1])
    assert told["train_loss"] is None and told["checkpoint"].endswith("step_00000012.pt")
    assert " values same" in run_in(clone, *GUARDED, "--data", corpus, "--verify_resume", 3)
    run(*GUARDED, "--out_dir", clone / "watched")
    assert_same_end(clone / "bare", clone / "watched")

    flags = ["--data", corpus, "--out_dir", "r", "--on_nonfinite", "rollback", "--log_interval", 1]
    told = run_in(clone, *GUARDED, *flags, before=lambda: poison(40, 56))  # of steps 6 and 7
    assert "; rolled back to " in told
    end = Checkpoint(clone / "r/checkpoints/step_00000012.pt").state()
    assert all(tensor.isfinite().all() for tensor in end["model"].values())
    assert len(end["rollbacks"]) == 1 and int(end["nonfinite"]) == 0
