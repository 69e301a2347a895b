"""A step of gpt2-124m against transformers' Qwen2 of that shape, nanoGPT and nanochat.

    python -m tests.bench training --nanogpt DIR --nanochat DIR

Forward, backward, clipping and AdamW's update on random tokens, in the precision that train.py
picks here. Each in a process of its own: ours in train.py's loop, the others in a plain loop with
autocast and fused AdamW, also nanoGPT, whose recipe for a CPU has neither. nanochat's model has as
many multiplications; it has its own Muon, which it always compiles, no clipping, and ours has Muon
beside it.
"""

import importlib.util
import os
import sys
from functools import partial

import torch

import config
from steady.models.device import pick_device, pick_dtype
from tests.bench.common import Figure, apart, compare, make_run, repeat, take_turns, train_steps

# The C library's caches of small blocks keep the crumbs between aligned tensors, so that no gap is
# large enough for a tensor of the same size again.
REUSE = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


def steady(flags: list[str]):
    return partial(train_steps, make_run(flags))


def plain_loop(cfg: config.Config, model, weights, loss):
    """A tutorial's loop. weights: for the optimizer; loss: tokens → the loss."""
    device = pick_device(cfg.device, 0)
    dtype = pick_dtype(cfg.precision, device)
    model.to(device)
    if cfg.compile:
        model.compile()
    optimizer = torch.optim.AdamW(weights, cfg.learning_rate, weight_decay=0.1, fused=True)

    def step():
        tokens = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.seq_len + 1), device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            found = loss(tokens)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return repeat(step, device)


def qwen2(flags: list[str]):
    from transformers import AutoModelForCausalLM, Qwen2Config

    cfg = config.resolve(config.parse(flags))
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))

    def loss(tokens):
        return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss

    return plain_loop(cfg, model, model.parameters(), loss)


def nanogpt(flags: list[str], checkout: str):
    cfg = config.resolve(config.parse(flags))
    found = importlib.util.spec_from_file_location("nanogpt_model", f"{checkout}/model.py")
    theirs = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(theirs)
    model = theirs.GPT(theirs.GPTConfig(
        block_size=cfg.seq_len, vocab_size=cfg.vocab_size, n_layer=cfg.n_layer, n_head=cfg.n_head,
        n_embd=cfg.d_model, dropout=0.0, bias=False))
    groups = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu").param_groups
    weights = [dict(params=g["params"], weight_decay=g["weight_decay"]) for g in groups]

    def loss(tokens):
        return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1]

    return plain_loop(cfg, model, weights, loss)


def nanochat(flags: list[str], checkout: str):
    cfg = config.resolve(config.parse(flags))
    dtype = pick_dtype(cfg.precision, pick_device(cfg.device, 0))
    os.environ["NANOCHAT_DTYPE"] = str(dtype).removeprefix("torch.")
    sys.path.insert(0, checkout)
    theirs = importlib.import_module("nanochat.gpt")
    model = theirs.GPT(theirs.GPTConfig(
        sequence_len=cfg.seq_len, vocab_size=cfg.vocab_size, n_layer=cfg.n_layer,
        n_head=cfg.n_head, n_kv_head=cfg.n_kv_head, n_embd=cfg.d_model, window_pattern="L"))
    model.init_weights()
    optimizer = model.setup_optimizer()
    if cfg.compile:
        model.compile(dynamic=False)

    def step():
        tokens = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.seq_len + 1))
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return repeat(step, torch.device("cpu"))


def three_steps(make, flags: list[str]):
    make(flags)(3)


def main(options) -> list[Figure]:
    batch, seq_len, rounds = (1, 64, 1) if options.quick else (4, 512, 4)
    flags = ["--model", "gpt2-124m", "--vocab_size", "50257", "--seq_len", str(seq_len),
             "--batch_size", str(batch), "--optimizer", "adamw"]
    if options.quick:
        flags += ["--n_layer", "2", "--d_model", "96", "--d_ff", "192", "--vocab_size", "512"]
    shape, figures = f"gpt2-124m {batch} x {seq_len}", []
    for how, switch, aim in (("eager", "--no_compile", ">= 1.15"),
                             ("compiled", "--compile", ">= 1.05")):
        makers = {"ours": (steady, [*flags, switch]),
                  "transformers' Qwen2": (qwen2, [*flags, switch])}
        aims = {"transformers' Qwen2": aim}
        if options.nanogpt:
            peer = "nanoGPT with autocast and fused AdamW"
            makers[peer] = (nanogpt, [*flags, switch], options.nanogpt)
            aims[peer] = ">= 1.25"
        if options.nanochat and not options.quick:
            makers["ours, muon"] = (steady, [*flags, switch, "--optimizer", "muon"])
            makers["nanochat"] = (nanochat, [*flags, switch], options.nanochat)
        found = take_turns(makers, rounds, steps=1 if options.quick else 3, warm_up=2)
        rates = {name: [batch * seq_len / s for s in each] for name, each in found.items()}
        figures += [compare(f"{shape}, {how}", f"{peer}, {how}", rates["ours"], rates[peer],
                            "{:.0f} tokens/s", aims[peer]) for peer in aims]
        if options.nanochat and not options.quick:
            figures.append(compare(f"{shape}, Muon, {how}", f"nanochat, {how}", rates["ours, muon"],
                                   rates["nanochat"], "{:.0f} tokens/s", ">= 1.15"))
        print(*(" | ".join(figure.row()) for figure in figures), sep="\n", flush=True)
    for tunables, where in (("", ""), (REUSE, ", GLIBC_TUNABLES")):
        os.environ["GLIBC_TUNABLES"] = tunables  # for the processes to come
        ours, theirs = zip(*([apart(three_steps, make, [*flags, "--no_compile"])[1]
                              for make in (steady, qwen2)] for _ in range(rounds)), strict=True)
        figures.append(compare(f"{shape}, peak memory{where}", f"transformers' Qwen2{where}", ours,
                               theirs, "{:.0f} MB", "<= 0.7"))
    del os.environ["GLIBC_TUNABLES"]
    return figures
