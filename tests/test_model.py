"""The model computes what it says, the same in every way it can be asked to."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import config
from model import Transformer, flops_per_token, generate, sample_token
from steady.models import layers
from steady.models.device import attention_backend, set_attention_backend
from steady.models.evaluation import output_entropy
from steady.models.layers import LinearCrossEntropy
from steady.options import ConfigError
from steady.tokens.files import IGNORE

CPU = torch.device("cpu")


def make(seed=0, **changes) -> Transformer:
    """A small model with no weight left at zero, so that every part takes part."""
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**changes))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def some_tokens(B=3, T=32, V=257):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


def mean_loss(model, tokens, targets):
    return model(tokens, targets).sum() / (targets != IGNORE).sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


VARIANTS = [{}, dict(qkv_bias=True), dict(qk_norm=True), dict(tie_embeddings=True),
            dict(n_kv_head=2), dict(head_dim=24)]


@pytest.mark.parametrize("changes", VARIANTS)
def test_at_the_start_blocks_are_the_identity_and_the_loss_is_that_of_a_guess(changes):
    torch.manual_seed(0)
    model, tokens = Transformer(tiny_config(**changes)), some_tokens(B=16)
    assert torch.equal(model.hidden(tokens), model.norm(model.embedding(tokens)))
    assert abs(mean_loss(model, tokens, tokens.roll(1, 1)).item() / math.log(257) - 1) < 0.02


@pytest.mark.parametrize("rows", [4, 99])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_is_that_of_the_logits(autocast, rows, monkeypatch):
    """The chunked loss, the one compiled for a GPU, that of a fork from logits; and gradients."""
    monkeypatch.setattr(LinearCrossEntropy, "cpu_chunk", 128 * rows)
    monkeypatch.setattr(LinearCrossEntropy, "rows", 12 * rows)  # of 128
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(layers, "on_cpu", lambda x: False)
    torch.manual_seed(0)
    n, width, vocab, padded = 21, 16, 99, 128
    hidden = torch.randn(n, width, requires_grad=True)
    head = layers.Head(width, padded, vocab)
    weight = nn.init.normal_(head.weight)
    targets = torch.randint(vocab, (n,))
    targets[3] = targets[20] = IGNORE
    factors, found = torch.rand(n), []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for losses in (LinearCrossEntropy.apply(hidden, weight, targets, vocab),
                       head(hidden[None], targets[None])[0],
                       layers.cross_entropies(head(hidden[None]), targets[None])[0],
                       plain_losses(hidden, weight, targets, vocab)):
            found.append((losses, *torch.autograd.grad((losses * factors).sum(), (hidden, weight))))
        assert not head(hidden)._is_view()
    *ours, plain = found
    for way in ours:
        for found, expected in zip(way, plain, strict=True):
            assert found.dtype == expected.dtype == torch.float32
            assert (found - expected).norm() / expected.norm() < (1e-2 if autocast else 1e-6)
        assert way[0][3] == 0 and way[0][20] == 0
    targets[0] = -1  # as others mark what is ignored: not the last id
    with pytest.raises(RuntimeError, match="-1 is out of bounds"):
        LinearCrossEntropy.apply(hidden, weight, targets, vocab)


def plain_losses(hidden, weight, targets, vocab):
    logits = F.linear(hidden, weight)[..., :vocab].float()
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def predictions(p: float, n=64, width=128, vocab=257, padded=320):
    """Hidden states and weights that give targets probabilities of p, give or take the odds."""
    torch.manual_seed(0)
    p = torch.sigmoid(math.log(p / (1 - p)) + torch.rand(n, 1) - 0.5)
    weight, targets = torch.randn(padded, width) * 0.05, torch.randint(vocab, (n,))
    start, least, most = torch.randn(n, width), torch.zeros(n, 1), torch.full((n, 1), 400.0)
    for _ in range(40):  # how far to go towards the target's weights
        middle = (least + most) / 2
        hidden = start + middle * weight[targets]
        found = (hidden @ weight[:vocab].T).softmax(-1).gather(1, targets[:, None])
        least, most = middle.where(found < p, least), middle.where(found >= p, most)
    targets[::16] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_confident_predictions_are_as_exact_as_plain_ones(dtype, on_cpu, monkeypatch):
    monkeypatch.setattr(layers, "on_cpu", lambda x: on_cpu)
    monkeypatch.setattr(LinearCrossEntropy, "cpu_chunk", 320 * 24)  # the last chunk has fewer
    for p in (0.1, 0.5, 0.84, 0.983, 0.998, 0.9999):
        hidden, weight, targets = predictions(p)
        inputs = [x.to(dtype).float().requires_grad_() for x in (hidden, weight)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        gradients = []
        for way, given in ((plain_losses, exact), (plain_losses, inputs),
                           (LinearCrossEntropy.apply, inputs)):
            with torch.autocast("cpu", dtype, enabled=given is inputs):
                losses = way(*given, targets, 257)
            loss = losses.sum() * (2**16 / 1536)  # as of 1,536 targets, with a scaler
            gradients.append(torch.autograd.grad(loss, given))
        for true, plain, ours in zip(*gradients, strict=True):
            assert (ours - true).norm() <= 1.1 * (plain - true).norm(), p


def test_attention_backends_agree_and_the_one_in_use_is_reported():
    model, tokens = make(n_head=4, n_kv_head=2), some_tokens()
    found = {}
    try:
        for name in ("auto", "flash", "math"):
            set_attention_backend(name)
            used = attention_backend(tiny_config(attention=name), CPU, torch.float32)
            assert name in ("auto", used)
            found[name] = model.hidden(tokens)
        set_attention_backend("cudnn")
        with pytest.raises(ConfigError, match="cudnn"):
            attention_backend(tiny_config(attention="cudnn"), CPU, torch.float32)
        model.hidden(tokens[:, :1])  # as on a GPU, where cuDNN does not take a single token
    finally:
        set_attention_backend("auto")
    torch.testing.assert_close(found["flash"], found["math"], rtol=1e-4, atol=1e-5)
    assert torch.equal(found["auto"], found["flash"])
    assert attention_backend(tiny_config(), CPU, torch.bfloat16) == "matmul"
    assert attention_backend(tiny_config(attention="flash"), CPU, torch.bfloat16) == "flash"
    assert not make(attention="math").blocks[0].attention.auto


@pytest.mark.parametrize("kind", ["causal", "both ways", "masked", "fewer keys and values"])
@pytest.mark.parametrize("T", [40, 300])  # probabilities kept, and computed again
def test_attention_by_products_is_as_exact_as_torchs(kind, T):
    torch.manual_seed(0)
    heads = 2 if kind == "fewer keys and values" else 4
    *given, grad = (torch.randn(2, n, T, 8, dtype=torch.float64) for n in (4, heads, heads, 4))
    given[2][:, :, 255:256] *= 100  # the last value that the first rows attend to
    mask = torch.rand(2, 1, T, T).gt(0.5).tril() | torch.eye(T, dtype=torch.bool)
    how = dict(mask=mask if kind == "masked" else None, dropout=0.0,
               causal=kind in ("causal", "fewer keys and values"))

    def results(dtype, auto):
        parts = [x.to(dtype).requires_grad_() for x in given]
        y = layers.attend(*parts, **how, auto=auto)
        return [y, *torch.autograd.grad(y, parts, grad.to(dtype))]

    ours = results(torch.bfloat16, True)
    for true, found in zip(results(torch.float64, True), ours, strict=True):
        assert found.dtype == torch.bfloat16 and (found - true).norm() < 0.015 * true.norm()
    assert not torch.equal(ours[0], results(torch.bfloat16, False)[0])


@pytest.mark.parametrize("T", [24, 300])
def test_attention_by_products_drops_the_same_in_both_passes(T):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, T, 8).bfloat16().requires_grad_() for _ in range(4))
    y = layers.attend(q, k, v, None, causal=True, dropout=0.5, auto=True)
    of_v, = torch.autograd.grad(y, v, grad)
    given, found = ((a.double() * b.double()).sum() for a, b in ((y, grad), (of_v, v)))
    assert found.item() == pytest.approx(given.item(), rel=0.03)  # y is linear in v
    whole = layers.attend(q, k, v, None, causal=True, dropout=0.0, auto=True)
    assert (y - whole).norm() > 0.3 * whole.norm()
    none = torch.zeros(1, 1, T, T, dtype=torch.bool)  # a row that attends to nothing
    assert layers.attend(q, k, v, none, causal=False, dropout=0.0, auto=True).isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputing_changes_nothing_but_memory_and_work(dropout):
    plain, tokens = make(dropout=dropout), some_tokens()
    recomputing = Transformer(tiny_config(dropout=dropout, activation_checkpointing="full"))
    for p in plain.parameters():  # or what a block begins as would hide its gradients
        torch.nn.init.normal_(p, std=0.1)
    recomputing.load_state_dict(plain.state_dict())
    found, flops = [], []
    for model in (plain, recomputing):
        torch.manual_seed(3)
        with FlopCounterMode(display=False) as counter:
            mean_loss(model, tokens, tokens).backward()
        found.append(gradients(model))
        flops.append(counter.get_total_flops())
    for name, g in found[0].items():
        assert torch.equal(g, found[1][name]), name
    assert flops[1] > flops[0]


SIZES = {"gpt2-124m": (50257, 124), "350m": (50257, 354), "1b": (128256, 1236),
         "7b": (32000, 6738)}  # vocabulary, millions of parameters


@pytest.mark.parametrize("name", config.MODELS)
def test_flops_are_those_that_torch_counts_and_sizes_what_names_say(name):
    vocab, millions = SIZES.get(name, (50257, None))
    cfg = config.resolve(config.parse(["--model", name, "--vocab_size", str(vocab)]))
    with torch.device("meta"):
        model = Transformer(cfg)
        tokens = torch.zeros(1, cfg.seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()
    counted = counter.get_total_flops() / cfg.seq_len
    assert flops_per_token(model, cfg) == pytest.approx(counted, rel=0.02)
    if millions:
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    model.blocks[-1] = model.blocks[0]  # shared weights compute as much
    assert flops_per_token(model, cfg) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("shape", [(64,), (2, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_eps_is_torchs(dtype, shape):
    x = torch.linspace(0, 1e-3, 64, dtype=dtype).view(1, *shape)
    ours, theirs = (kind(shape, dtype=dtype)(x) for kind in (layers.RMSNorm, nn.RMSNorm))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype, recipes", [(torch.bfloat16, 3), (torch.float32, 1)])
def test_casts_of_large_weights_and_silu_are_computed_again_to_the_bit(dtype, recipes, monkeypatch):
    recipe, kept, grads = layers.recipe, [], []
    for each in (lambda x: x.detach, lambda x: kept.append((x, recipe(x))) or kept[-1][1]):
        monkeypatch.setattr(layers, "recipe", each)
        model = make(d_model=64, d_ff=8192, n_layer=1, qk_norm=False)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            losses, others = (model(some_tokens(16), some_tokens(16)) for _ in range(2))
        losses.sum().backward()
        grads.append(gradients(model))
    assert all(torch.equal(grads[0][name], grad) for name, grad in grads[1].items())
    made = [follow() for _, follow in kept[: len(kept) // 2]]
    again = [y.data_ptr() != x.data_ptr() for (x, _), y in zip(kept, made, strict=False)]
    views = [x for x in made if x.untyped_storage().nbytes() > 2 * x.nbytes]
    assert (sum(again), views) == (recipes, [])  # gate_up, down, silu; no view of v
    with torch.no_grad():
        model.blocks[0].mlp.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        others.sum().backward()


def test_a_forward_pass_without_a_backward_pass_is_freed():
    model, outputs = make(n_layer=2, d_model=512, d_ff=512), []
    model.blocks[0].register_forward_hook(lambda _, x, y: outputs.append(weakref.ref(y)))
    model(some_tokens(), some_tokens())
    assert outputs[0]() is None


@torch.no_grad()
def continued(model, tokens, new):
    """The likeliest continuation, each token computed anew from the newest half or more of 32."""
    start = 0
    for _ in range(new):
        if tokens.shape[1] - start > 32:
            start = tokens.shape[1] - 16
        logits = model.head(model.hidden(tokens[:, start:])[:, -1])
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("prompt_length, new", [(2, 20), (30, 40), (40, 3)])
def test_generation_with_a_cache_is_that_without(changes, prompt_length, new):
    model, prompt = make(**changes), some_tokens(B=2, T=prompt_length)
    found = generate(model, prompt, new, temperature=0)
    assert torch.equal(found, continued(model, prompt, new))
    hook = model.embedding.register_forward_hook(lambda _, ids, x: x + F.pad(x, (0, 0, 1, -1)))
    assert torch.equal(generate(model, prompt, new, temperature=0), continued(model, prompt, new))
    hook.remove()
    model.blocks[-1].attention.register_forward_pre_hook(lambda _, args: args[:2])  # no cache
    assert torch.equal(found, generate(model, prompt, new, temperature=0))


def test_sampling_follows_the_distribution():
    model, prompt = make(), some_tokens(B=1, T=4).repeat(4000, 1)
    logits = model.head(model.hidden(prompt[:1])[:, -1])[0]

    torch.manual_seed(0)
    new, top = generate(model, prompt, 1, temperature=0.7, top_k=3)[:, -1], logits.topk(3)
    expected = (top.values / 0.7).softmax(-1)
    frequency = torch.stack([(new == i).float().mean() for i in top.indices])
    assert frequency.sum().item() == pytest.approx(1)
    torch.testing.assert_close(frequency, expected, atol=0.04, rtol=0)


@pytest.mark.parametrize("training", [False, True])
def test_rows_are_written_without_dropout_until_the_last_has_ended(training):
    model, prompt, columns = make(dropout=0.5).train(training), some_tokens(B=2, T=5), []
    free = generate(model, prompt, 20, temperature=0)
    assert model.training == training  # it leaves the mode as it was
    stop = int(free[0, 8])
    assert stop not in free[1, 5:12]
    found = generate(model, prompt, 20, temperature=0, stop=(stop,), on_token=columns.append)
    assert (found[0, 8:] == stop).all() and torch.equal(found[1, :12], free[1, :12])
    assert torch.equal(torch.stack(columns, 1), found[:, 5:])


def test_top_p_keeps_the_fewest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    torch.manual_seed(0)
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.81, 3), (1.0, 4)):
        assert set(sample_token(logits, 1.0, 0, top_p).flatten().tolist()) == set(range(kept))
    assert sample_token(logits, 1.0, top_k=50, top_p=1.0).max() < 4  # of more than there are
    model, prompt = make(), some_tokens(B=1, T=4)
    assert torch.equal(*(generate(model, prompt, 9, temperature=t) for t in (0, 1e-45)))


def test_entropy_of_the_output_is_that_of_its_distribution():
    model, tokens = make(dropout=0.5), some_tokens(B=9)
    targets = tokens.roll(-1, 1)
    targets[:, 20:] = IGNORE
    found = output_entropy(model, tokens, targets != IGNORE)
    assert model.training
    model.eval()
    p = model(tokens[:8, :20]).softmax(-1)  # 8 rows of 32 are the 256 positions it takes
    assert found.item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
