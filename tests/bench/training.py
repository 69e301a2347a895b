"""A step of gpt2-124m against transformers' Qwen2 of that shape and nanoGPT, and generation.

    python -m tests.bench training --nanogpt DIR

Forward, backward, clipping and AdamW's update on random tokens, in the precision that train.py
picks here. Each in a process of its own: ours in train.py's loop, the others in a plain loop with
autocast and fused AdamW, also nanoGPT, whose recipe for a CPU has neither. Then the FLOP/s of a
step against those of a product of matrices, and generation from the same weights.
"""

import importlib.util
import sys
import tempfile
from functools import partial

import torch

import config
from model import Transformer, flops_per_token, generate
from steady.models import device as devices
from steady.ranks.parallel import Shards
from tests.bench.common import (
    CPU,
    Figure,
    apart,
    compare,
    make_run,
    matrix_products,
    repeat,
    take_turns,
    train_steps,
)


def resolved(flags: list[str]) -> tuple[config.Config, torch.device, torch.dtype]:
    """What train.py makes of the flags here."""
    cfg = config.resolve(config.parse(flags))
    device = devices.pick_device(cfg.device, 0)
    return cfg, device, devices.pick_dtype(cfg.precision, device)


def steady(flags: list[str]):
    return partial(train_steps, make_run(flags))


def qwen2_model(cfg: config.Config):
    from transformers import AutoModelForCausalLM, Qwen2Config

    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.n_kv_head, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    ))


def plain_loop(flags: list[str], model, weights, loss):
    """The loop that a tutorial has. weights: for the optimizer; loss: tokens → the loss."""
    cfg, device, dtype = resolved(flags)
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
    model = qwen2_model(resolved(flags)[0])

    def loss(tokens):
        return model(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss

    return plain_loop(flags, model, model.parameters(), loss)


def nanogpt(flags: list[str], checkout: str):
    cfg = resolved(flags)[0]
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

    return plain_loop(flags, model, weights, loss)


def three_steps(make, flags: list[str]):
    make(flags)(3)


def writer(flags: list[str], new_tokens: int, batch: int, dtype: str, ours: bool):
    """Greedy generation with a cache; both have the weights of one folder, in this dtype.

    Without the padding token in the prompt, for which transformers would take a slower path.
    """
    from steady.models.huggingface import config_from_hf, load_initial

    torch.manual_seed(0)
    theirs = qwen2_model(resolved(flags)[0]).eval()
    prompt = torch.arange(1, 17).repeat(batch, 1)
    write = partial(theirs.generate, prompt, max_new_tokens=new_tokens, do_sample=False,
                    pad_token_id=0)
    if ours:
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            model = Transformer(config.resolve(config_from_hf(config.Config(init_from=folder))))
            load_initial(model, folder, Shards())
        devices.keep_freed_memory(CPU)
        write = partial(generate, model.to(devices.DTYPES[dtype]), prompt, new_tokens,
                        temperature=0)
    theirs.to(devices.DTYPES[dtype])
    return repeat(write)


def per_second(work: float, seconds: list[float]) -> list[float]:
    return [work / s for s in seconds]


def main(options) -> list[Figure]:
    batch, seq_len, rounds, n = (1, 64, 1, 128) if options.quick else (4, 512, 4, 4096)
    flags = ["--model", "gpt2-124m", "--vocab_size", "50257", "--seq_len", str(seq_len),
             "--batch_size", str(batch), "--optimizer", "adamw"]
    if options.quick:
        flags += ["--n_layer", "2", "--d_model", "96", "--d_ff", "192", "--vocab_size", "512"]
    shape, figures = f"gpt2-124m {batch} x {seq_len}", []
    cfg, device, dtype = resolved(flags)
    with torch.device("meta"):
        flops = flops_per_token(Transformer(cfg), cfg)
    ways = [("eager", "--no_compile", ">= 1.15", ">= 0.7"),
            ("compiled", "--compile", ">= 1.05", ">= 0.78")]
    for how, switch, faster, share in ways[options.quick :]:
        makers = {make: (globals()[make], [*flags, switch]) for make in ("steady", "qwen2")}
        if options.nanogpt:
            makers["nanogpt"] = (nanogpt, [*flags, switch], options.nanogpt)
        makers["product"] = (matrix_products, n, device, dtype)
        found = take_turns(makers, rounds, steps=1 if options.quick else 3, warm_up=2)
        products = per_second(2 * n**3 / 1e9, found.pop("product"))
        rates = {name: per_second(batch * seq_len, seconds) for name, seconds in found.items()}
        ours = rates.pop("steady")
        names = {"qwen2": (f"transformers' Qwen2, {how}", faster),
                 "nanogpt": (f"nanoGPT with autocast and fused AdamW, {how}", ">= 1.25")}
        figures += [compare(f"{shape}, {how}", names[peer][0], ours, theirs, "{:.0f} tokens/s",
                            names[peer][1]) for peer, theirs in rates.items()]
        figures.append(compare(f"{shape}, {how}: FLOP/s", f"a product of {n} x {n}",
                               [rate * flops / 1e9 for rate in ours], products, "{:.0f} GFLOP/s",
                               share))
    if device.type != "cpu":
        return figures
    ours, theirs = (apart(three_steps, make, [*flags, "--no_compile"])[1]
                    for make in (steady, qwen2))
    figures.append(compare(f"{shape}, peak memory", "transformers' Qwen2", [ours], [theirs],
                           "{:.0f} MB", "<= 0.7"))
    new, precision = 4 if options.quick else 48, "bf16" if dtype == torch.bfloat16 else "fp32"
    for size in (1,) if options.quick else (1, 8):
        found = take_turns({whose: (writer, flags, new, size, precision, whose == "ours")
                            for whose in ("ours", "theirs")}, rounds)
        ours, theirs = (per_second(new * size, seconds) for seconds in found.values())
        figures.append(compare(f"gpt2-124m, greedy generation, batch {size}",
                               "transformers' generate", ours, theirs, "{:.0f} tokens/s", ">= 1"))
    return figures
