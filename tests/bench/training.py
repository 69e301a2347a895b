"""A step of gpt2-124m against transformers' Qwen2 of that shape, its Trainer, and the matrix peak.

Forward, backward, clipping and AdamW's update on random tokens, in the precision that train.py
picks here. Each in a process of its own, with the settings it has in use: ours as train.py sets
it up, Qwen2 in a plain loop with fused AdamW, the Trainer where accelerate is installed. The peak
is that of products of 2048 x 2048 in the same type. Then generation from the same weights.
"""

import importlib.util
import multiprocessing
import resource
import tempfile
from functools import partial
from pathlib import Path

import torch

import config
import train
from model import Transformer, flops_per_token, generate
from tests.bench.common import Figure, make_run, ratios, take_turns, train_step, wait

VOCAB = 50257
MATRIX = 2048


def settings() -> tuple[torch.device, torch.dtype]:
    """As train.py picks them."""
    device = train.pick_device("auto", 0)
    return device, train.pick_dtype("auto", device)


def our_flags(batch: int, seq_len: int) -> list[str]:
    return ["--model", "gpt2-124m", "--seq_len", str(seq_len), "--batch_size", str(batch),
            "--vocab_size", str(VOCAB), "--optimizer", "adamw"]  # fmt: skip


def their_config():
    from transformers import Qwen2Config

    shape = config.MODELS["gpt2-124m"]
    return Qwen2Config(
        vocab_size=VOCAB, hidden_size=shape["d_model"], intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["n_layer"], num_attention_heads=shape["n_head"],
        num_key_value_heads=shape["n_kv_head"], max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def steady(batch: int, seq_len: int, compiled: bool):
    train.keep_freed_memory(settings()[0])
    run = make_run(our_flags(batch, seq_len))
    if compiled:
        run.model.compile()
    tokens = torch.randint(VOCAB, (batch, seq_len), device=run.device)

    def step():
        train_step(run, tokens)
        wait(run.device)

    return step


def qwen2(batch: int, seq_len: int, compiled: bool):
    from transformers import AutoModelForCausalLM

    device, dtype = settings()
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    model = AutoModelForCausalLM.from_config(their_config()).to(device)
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(VOCAB, (batch, seq_len), device=device)

    def step():
        with autocast:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)

    return step


def trainer(batch: int, seq_len: int):
    """The Trainer's own loop, stopped before each step until it is asked for one."""
    import threading

    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    device, dtype = settings()
    begin, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            begin.acquire()

        def on_step_end(self, *args, **kwargs):
            wait(device)
            done.release()

    tokens = torch.randint(VOCAB, (seq_len,))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=10**6,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=6e-4,
        bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu", optim="adamw_torch_fused",
    )  # fmt: skip
    data = [dict(input_ids=tokens, labels=tokens)] * (batch * 1000)
    model = AutoModelForCausalLM.from_config(their_config())
    loop = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Turns()])
    threading.Thread(target=loop.train, daemon=True).start()

    def step():
        begin.release()
        done.acquire()

    return step


def product():
    device, dtype = settings()
    train.keep_freed_memory(device)
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def step():
        for _ in range(10):
            torch.mm(a, b, out=out)
        wait(device)

    return step


def peak_mb(make, *args) -> float:
    """What a process that makes three steps has at most."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(three_steps, (make, args))


def three_steps(make, args) -> float:
    step = make(*args)
    for _ in range(3):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def writers(new_tokens: int, batch: int, ours: bool):
    """Greedy generation with a cache, from the same weights; both made from one folder."""
    from transformers import AutoModelForCausalLM

    from convert import adopt, load_weights

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config()).eval()
    prompt = torch.arange(16).repeat(batch, 1)
    if not ours:
        return lambda: theirs.generate(prompt, max_new_tokens=new_tokens, do_sample=False,
                                       pad_token_id=0)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        model = Transformer(config.resolve(adopt(config.Config(init_from=folder))))
        load_weights(model, Path(folder))
    train.keep_freed_memory(torch.device("cpu"))
    return partial(generate, model, prompt, new_tokens, temperature=0)


def main(options) -> list[Figure]:
    batch, seq_len, rounds = (1, 64, 1) if options.quick else (4, 512, 3)
    tokens, figures = batch * seq_len, []
    cfg = config.resolve(config.parse(our_flags(batch, seq_len)))
    with torch.device("meta"):
        flops = tokens * flops_per_token(Transformer(cfg), cfg)
    shape = f"gpt2-124m {batch} x {seq_len}"

    def rate(seconds) -> str:
        return f"{tokens / sorted(seconds)[len(seconds) // 2]:.0f} tokens/s"

    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        kinds = {"steady": (steady, batch, seq_len, compiled),
                 "qwen2": (qwen2, batch, seq_len, compiled), "product": (product,)}  # fmt: skip
        if not compiled and importlib.util.find_spec("accelerate"):
            kinds["trainer"] = (trainer, batch, seq_len)
        found = take_turns(kinds, rounds, warm_up=2)
        for name, reference, aim in (("qwen2", f"transformers' Qwen2, {how}", (1.15, 1.05)),
                                     ("trainer", "Hugging Face Trainer", (2, 2))):  # fmt: skip
            if name in found:
                figures.append(Figure(
                    f"{shape}, {how}", reference, ratios(found[name], found["steady"]),
                    f">= {aim[compiled]}", rate(found["steady"]), rate(found[name]),
                ))  # fmt: skip
        product_flops = 20 * MATRIX**3
        share = ratios([s / product_flops for s in found["product"]],
                       [s / flops for s in found["steady"]])  # fmt: skip
        figures.append(Figure(
            f"{shape}, {how}: FLOP/s", "peak of matrix products", share,
            ">= 0.45" if compiled else "", f"{flops / min(found['steady']) / 1e9:.0f} GFLOP/s",
            f"{product_flops / min(found['product']) / 1e9:.0f} GFLOP/s",
        ))  # fmt: skip
    if settings()[0].type == "cpu":
        ours, theirs = (peak_mb(make, batch, seq_len, False) for make in (steady, qwen2))
        figures.append(Figure(f"{shape}, peak memory", "transformers' Qwen2", [ours / theirs],
                              "<= 1", f"{ours:.0f} MB", f"{theirs:.0f} MB"))  # fmt: skip
        for size in (1, 8):
            new = 4 if options.quick else 48
            found = take_turns({"ours": (writers, new, size, True),
                                "theirs": (writers, new, size, False)}, rounds)  # fmt: skip
            figures.append(Figure(
                f"gpt2-124m, greedy generation, batch {size}", "transformers' generate",
                ratios(found["theirs"], found["ours"]), ">= 1",
                f"{new * size / min(found['ours']):.0f} tokens/s",
                f"{new * size / min(found['theirs']):.0f} tokens/s",
            ))  # fmt: skip
    return figures
