"""What the benchmarks share: kinds that take turns, ratios with their spread, the table."""

import contextlib
import html
import math
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import config
import train
from model import Transformer


@dataclass
class Figure:
    """A line of the table: ours against a reference measured in turns with it in the same run."""

    what: str
    reference: str
    ratios: list[float]  # one of each round
    aim: str = ""  # as ">= 1.15"
    ours: str = ""  # as "143 tokens/s"
    theirs: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        if not self.aim:
            return None
        sign, value = self.aim.split()
        return self.ratio >= float(value) if sign == ">=" else self.ratio <= float(value)

    def row(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{short(low)} to {short(high)}" if len(self.ratios) > 1 else ""
        verdict = {None: "", True: f"{self.aim}: met", False: f"{self.aim}: missed"}[self.met]
        return [self.what, self.reference, short(self.ratio), spread, self.ours, self.theirs,
                verdict]  # fmt: skip


def short(ratio: float) -> str:
    return f"{ratio:.4g}" if 0.95 < ratio < 1.05 else f"{ratio:.3g}"


COLUMNS = ["what", "against", "ratio", "spread", "ours", "theirs", "aim"]


def table(rows: list[list[str]]) -> str:
    """Columns aligned, as Markdown."""
    rows = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
             for row in rows]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def ratios(over: list[float], under: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


class Off:
    """In the place of a monitor: does nothing."""

    seconds = 0.0

    def phase(self, name):
        pass

    def due(self, step, every=None):
        return False

    def health(self, step, named_parameters):
        return contextlib.nullcontext()

    def step(self, *args, **kwargs):
        pass


def make_run(flags: list[str]) -> SimpleNamespace:
    """What `train.update` needs of a train.Run, made as train.py makes it, with no monitor."""
    cfg = config.resolve(config.parse(flags))
    device = train.pick_device(cfg.device, 0)
    dtype = train.pick_dtype(cfg.precision, device)
    model = Transformer(cfg).to(device)
    return SimpleNamespace(
        cfg=cfg, device=device, dtype=dtype, model=model, named=list(model.named_parameters()),
        optimizers=train.make_optimizers(model, cfg, device), monitor=Off(),
        scaler=torch.amp.GradScaler(device.type, enabled=False),
        autocast=torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    )  # fmt: skip


def train_step(run: SimpleNamespace, tokens: torch.Tensor):
    with run.autocast:
        loss = run.model(tokens, tokens)[0] / tokens.numel()
    loss.backward()
    train.update(run, run.named, 1)


def wait(device: torch.device):
    """For what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def serve(pipe, make, args):
    """In a process of its own: make the step once, then run it so many times as is asked for."""
    step = make(*args)
    for n in iter(pipe.recv, 0):
        began = time.perf_counter()
        for _ in range(n):
            step()
        pipe.send((time.perf_counter() - began) / n)


def take_turns(kinds: dict, rounds: int, steps: int = 1, warm_up: int = 1) -> dict:
    """kinds: {name: (make, *args)} → {name: [seconds a step, of each round]}.

    make(*args) returns what makes one step. Each kind lives in a process of its own, so that
    neither its memory nor its settings touch another's, and they take turns: what else the machine
    does falls on all of them.
    """
    context, workers = multiprocessing.get_context("spawn"), {}
    for name, (make, *args) in kinds.items():
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, make, args), daemon=True)
        process.start()
        there.close()
        workers[name] = process, here
    found = {name: [] for name in kinds}
    try:
        for i in range(-1, rounds):
            for name, (_, pipe) in workers.items():
                pipe.send(steps if i >= 0 else warm_up)
                seconds = pipe.recv()
                if i >= 0:
                    found[name].append(seconds)
    finally:
        for process, pipe in workers.values():
            with contextlib.suppress(OSError):
                pipe.send(0)
            process.join(30)
    return found


def picture(record: dict) -> str:
    """SVG: how many times better than each reference, on a logarithmic axis; a line is the spread.

    record: what --json wrote. Where the aim is to be small (time, memory), better is 1 / ratio.
    What has no aim, or is a small share of its reference, is not shown.
    """
    figures = [Figure(**figure) for figure in record["figures"]]
    figures = [f for f in figures if f.aim and f.ours and f.theirs and 0.05 < f.ratio < 20]
    label, zero, decade, line = 560, 720, 300, 24  # pixels
    body = []
    for i, figure in enumerate(figures):
        small = figure.aim.startswith("<=")
        better = sorted((1 / r if small else r) for r in figure.ratios if r)
        low, middle, high = (
            zero + decade * math.log10(x)
            for x in (better[0], statistics.median(better), better[-1])
        )
        y = 40 + line * i
        colour = "#2a7f62" if figure.met else "#b5533c"
        name = html.escape(f"{figure.what} · {figure.reference}")
        body += [
            f'<text x="{label}" y="{y + 5}" text-anchor="end">{name}</text>',
            f'<rect x="{min(zero, middle):.0f}" y="{y - 7}" width="{abs(middle - zero) + 1:.0f}" '
            f'height="14" fill="{colour}"/><path d="M{low:.0f} {y}H{high:.0f}" stroke="#222"/>',
            f'<text x="{max(zero, high) + 6:.0f}" y="{y + 5}">'
            f"{statistics.median(better):.3g} x</text>",
        ]  # fmt: skip
    bottom = 40 + line * len(figures)
    title = f"times better than the reference; {record['device']}, {record['precision']}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1200" height="{bottom + 20}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="20" y="20">{html.escape(title)}: green where the aim is met</text>'
        + "\n".join(body)
        + f'<path d="M{zero} 28V{bottom}" stroke="#222"/></svg>\n'
    )
