"""Tokens per second of a named size, eager and compiled, interleaved in one process.

    python tests/bench/throughput.py --model gpt2-124m --batch 4 --seq_len 512

Forward, backward, clipping and the optimizer's update on random tokens, with the precision that
train.py picks here. Prints the median of each, and the ratio of compiled to eager.
"""

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import config  # noqa: E402
import train  # noqa: E402
from model import Transformer, flops_per_token  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each kind")
    args = parser.parse_args()

    device = train.pick_device("auto", 0)
    dtype = train.pick_dtype("auto", device)
    cfg = config.resolve(config.parse([
        "--model", args.model, "--seq_len", str(args.seq_len), "--batch_size", str(args.batch),
        "--vocab_size", str(args.vocab_size), "--optimizer", args.optimizer,
    ]))  # fmt: skip
    tokens = torch.randint(args.vocab_size, (args.batch, args.seq_len), device=device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(device.type, enabled=False)

    def stepper(compiled):
        model = Transformer(cfg).to(device)
        if compiled:
            model.compile()
        quiet = SimpleNamespace(health=lambda step, parameters: contextlib.nullcontext())
        run = SimpleNamespace(cfg=cfg, scaler=scaler, monitor=quiet,
                              optimizers=train.make_optimizers(model, cfg, device))  # fmt: skip
        parameters = list(model.named_parameters())

        def step():
            began = time.perf_counter()
            with autocast:
                loss = model(tokens, tokens)[0] / tokens.numel()
            loss.backward()
            train.update(run, parameters, 1)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        return model, step

    steps = {"eager": stepper(False), "compiled": stepper(True)}
    flops = flops_per_token(steps["eager"][0], cfg)
    first = {name: step() for name, (_, step) in steps.items()}
    times = {name: [] for name in steps}
    for _ in range(args.steps):
        for name, (_, step) in steps.items():
            times[name].append(step())
    print(
        f"{args.model}, {args.batch} x {args.seq_len}, {dtype}, {torch.get_num_threads()} threads"
    )
    for name, seconds in times.items():
        rate = tokens.numel() / statistics.median(seconds)
        print(f"{name:9s} {rate:8.0f} tokens/s ({tokens.numel() / max(seconds):.0f} to "
              f"{tokens.numel() / min(seconds):.0f}), {rate * flops / 1e12:.3f} TFLOP/s, first "
              f"step {first[name]:.1f} s")  # fmt: skip
    ratios = sorted(e / c for e, c in zip(times["eager"], times["compiled"], strict=True))
    print(
        f"compiled / eager: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
