"""Our Transformer against transformers' Qwen2: same weights, same batch, same autocast.

    python tests/bench/against_transformers.py [--batch 4] [--seq_len 512] [--rounds 3]

The shape of gpt2-124m. Forward and backward, eager and compiled, interleaved in one process; the
peak of memory in a process each; then greedy generation with a cache, batches of 1 and 8.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import config  # noqa: E402
import convert  # noqa: E402
import train  # noqa: E402
from model import Transformer, generate  # noqa: E402


def make_both(folder: Path, args):
    shape = config.MODELS["gpt2-124m"]
    found = Qwen2Config(
        vocab_size=args.vocab_size, hidden_size=shape["d_model"], intermediate_size=shape["d_ff"],
        num_hidden_layers=shape["n_layer"], num_attention_heads=shape["n_head"],
        num_key_value_heads=shape["n_kv_head"], max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(found)
    theirs.save_pretrained(folder)
    cfg = config.resolve(convert.adopt(config.Config(init_from=str(folder))))
    ours = Transformer(cfg)
    convert.load_weights(ours, folder)
    return ours, theirs


def losses(ours, theirs):
    """kind → tokens → mean loss, as each is used."""

    def of_theirs(tokens):
        logits = theirs(tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return {"steady": lambda tokens: ours(tokens, tokens)[0] / tokens.numel(),
            "transformers": of_theirs}  # fmt: skip


def peak_mb(loss, tokens, autocast) -> float:
    """Of a step in a fork of this process, over what it had before; 0 where nobody tells."""
    if not os.path.exists("/proc/self/clear_refs"):
        return 0.0
    reader, writer = os.pipe()
    if os.fork() == 0:

        def status(name):
            text = open("/proc/self/status").read()
            return int(text.split(name)[1].split()[1]) / 1e3

        torch.set_num_threads(1)  # those of the parent are not in a fork
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        with autocast:
            value = loss(tokens)
        value.backward()
        os.write(writer, f"{status('VmHWM') - before}".encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    return float(os.read(reader, 100))


def show(name: str, found: dict, unit: float, what: str):
    ratios = [a / b for a, b in zip(found["transformers"], found["steady"], strict=True)]
    rates = "  ".join(
        f"{kind} {unit / statistics.median(s):.0f} {what}" for kind, s in found.items()
    )
    print(f"{name:24s} {rates}  ratio {statistics.median(ratios):.2f} "
          f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--no_compile", action="store_true")
    args = parser.parse_args()
    device = train.pick_device("auto", 0)
    dtype = train.pick_dtype("auto", device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = make_both(Path(folder), args)
    tokens = torch.randint(args.vocab_size, (args.batch, args.seq_len))
    print(f"gpt2-124m as Qwen2, {args.batch} x {args.seq_len}, {dtype}, {device.type}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    if device.type == "cpu":
        memory = {name: peak_mb(loss, tokens, autocast)
                  for name, loss in losses(ours, theirs).items()}  # fmt: skip
        print("peak memory of a step    " + "  ".join(f"{n} {mb:.0f} MB" for n, mb in
                                                       memory.items()))  # fmt: skip
    ours, theirs, tokens = ours.to(device), theirs.to(device), tokens.to(device)

    def step(loss) -> float:
        gc.collect()
        began = time.perf_counter()
        with autocast:
            value = loss(tokens)
        value.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        for model in (ours, theirs):
            model.zero_grad(set_to_none=True)
        return seconds

    def measure(name):
        kinds = losses(ours, theirs)
        with autocast, torch.no_grad():
            a, b = (loss(tokens).item() for loss in kinds.values())
        assert abs(a - b) < 1e-2 * b, (a, b)
        for loss in kinds.values():
            step(loss)
        found = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, loss in kinds.items():
                found[kind].append(step(loss))
        show(name, found, tokens.numel(), "tokens/s")

    measure("forward + backward")
    for batch in (1, 8):
        prompt, new = tokens[:1, :16].repeat(batch, 1), args.new_tokens
        kinds = {
            "steady": partial(generate, ours, prompt, new, temperature=0),
            "transformers": partial(theirs.generate, prompt, max_new_tokens=new, do_sample=False,
                                    pad_token_id=0),
        }  # fmt: skip
        assert torch.equal(*(write() for write in kinds.values()))
        found = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, write in kinds.items():
                began = time.perf_counter()
                write()
                found[kind].append(time.perf_counter() - began)
        show(f"generation, batch {batch}", found, batch * args.new_tokens, "tokens/s")
    if not args.no_compile:
        ours.compile()
        theirs.compile()
        measure("compiled")


if __name__ == "__main__":
    main()
