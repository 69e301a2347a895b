"""The Muon optimizer, for matrices: momentum, orthogonalized by polynomials.

Keller Jordan 2024, kellerjordan.github.io/posts/muon; rows normalized as in arXiv:2510.05491.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

LARGE = 2**22  # numbers in a stack; smaller ones are done together: faster than sending them
MOST = 2**24  # numbers that a rank does together; a step makes several copies of them

# a x + b x³ + c x⁵, one after the other, bring singular values from 0.02 to 1 into 0.91 to 1.09:
# the best that three can do (Polar Express, arXiv:2505.16932, algorithm 1), but of x / 1.02, as
# bf16 may round x to above 1, and they diverge there.
POLAR = ((7.5598, -20.8383, 14.7169), (3.1523, -2.2721, 0.4540), (2.1748, -1.5021, 0.3720))


class Muon(torch.optim.Optimizer):
    """Muon with updates of the size of AdamW's, so that both take the same learning rate.

    Matrices of one shape are a stack, and so is a weight of three dimensions, such as the experts
    of a layer. Non-finite gradients are skipped on the device. An orthogonalized row is divided by
    the root of a running mean of its squares, so that all rows move alike.

    Several ranks share the work (shards: parallel.Shards). If each holds some rows of every matrix,
    an all-to-all gives each rank some whole matrices to orthogonalize, and another one brings the
    rows back. If all hold the same matrices on one host, each does some of them. Of a weight of
    three dimensions, a rank holds whole matrices and does them alone.
    """

    by_rows = True  # given `shards`, some rows of each weight are enough: see parallel.Shards

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.9,
                 beta2: float = 0.95, dtype: torch.dtype = torch.float32, polynomials=POLAR,
                 shards=None):
        self.dtype, self.polynomials = dtype, polynomials  # for the orthogonalization
        self.shards = shards if shards and shards.size > 1 else None
        self.helpers = shards.helpers if shards else 1
        self.grad_scale = self.found_inf = None
        self.average, self.apply, self.number = average, apply, float
        self.batches = []  # lists of parts to orthogonalize together: see `parts`
        ranks, given, groups = self.shards.size if self.shards else 1, list(params), []
        for group in given if given and isinstance(given[0], dict) else [dict(params=given)]:
            by_shape = {}
            for p in group["params"]:
                shape = whole_rows(p), *p.shape[1:]
                assert p.ndim in (2, 3) and math.prod(shape), (
                    f"Muon: a weight of shape {[*p.shape]}; expected a matrix or a stack of them")
                by_shape.setdefault(shape, []).append(p)
            for shape, same in by_shape.items():
                # equally many matrices for each rank: one without any would wait for the others
                n = ranks * max(1, MOST // math.prod(shape)) if len(shape) == 2 else 1
                groups += [group | dict(params=same[i : i + n]) for i in range(0, len(same), n)]
        super().__init__(groups or given, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      beta2=beta2))

    def compile(self):
        """Compile the functions besides matrix products, each to one pass over memory."""
        limits = torch.compiler.config  # each size is compiled; beyond the limit all is eager
        limits.recompile_limit = max(limits.recompile_limit, 2 * len(self.param_groups))
        self.average = torch.compile(average, dynamic=False)
        self.apply = torch.compile(apply, dynamic=False)
        self.number = torch.tensor  # as a float, each learning rate would be compiled anew

    @torch.no_grad()
    def step(self, closure=None):
        if not (self.state and self.batches):  # at first, or after a fork has cleared the state
            self.batches = self.make_batches()
        go = 1.0 if self.found_inf is None else 1.0 - self.found_inf  # 0 skips the step
        for batch in self.batches:
            directions = []
            for group, part, momentum, _ in batch:
                grads = [torch.zeros_like(p[part]) if p.grad is None else p.grad[part]
                         for p in group["params"]]
                directions.append(self.average(grads, momentum, group["momentum"],
                                               self.grad_scale, go, self.dtype))
            first = batch[0][0]["params"][0]
            if self.shards and first.ndim == 2:
                directions = [self.orthogonalize_together(directions[0], whole_rows(first))]
            elif self.helpers > 1 and directions[0].numel() >= LARGE:
                directions = [self.orthogonalize_some(directions[0])]
            else:
                directions = self.orthogonalize(directions)
            for (group, part, _, squares), direction in zip(batch, directions, strict=True):
                lr = self.number(group["lr"])
                self.apply([p[part] for p in group["params"]], direction, squares, group["beta2"],
                           lr, lr * group["weight_decay"], go)
    step._step_supports_amp_scaling = True  # reads grad_scale and found_inf, as fused AdamW does

    def make_batches(self) -> list[list[tuple]]:
        """All parts: large and sharded ones alone, small ones of the same smaller side together."""
        batches, numbers, before = [], 0, None
        groups = [group for group in self.param_groups if group["params"]]
        for part in (part for group in groups for part in self.parts(group)):
            momentum = part[2]
            numbers += momentum.numel()
            alone = self.shards or momentum.numel() >= LARGE
            alike = id(momentum) if alone else (min(momentum.shape[1:]), numbers // MOST)
            if alike != before:
                batches.append([])
            batches[-1].append(part)
            before = alike
        return batches

    def parts(self, group: dict) -> list[tuple]:
        """(group, slice of its weights, momenta [n, rows, columns], mean squares [n, rows, 1]).

        Matrices are one part; a stack of over MOST numbers is several. A weight's state is a view.
        """
        params, stacks = group["params"], []
        is_stack, ranks = params[0].ndim == 3, self.shards.size if self.shards else 1
        rows = params[0].shape[1] if is_stack else whole_rows(params[0])
        side = max(rows, params[0].shape[-1])
        for name, shape, new in (("momentum", slice(None), 0), ("row_squares", slice(1), 1 / side)):
            held = [self.state[p].get(name, torch.full_like(p[..., shape], new)) for p in params]
            stack = stacked(held, rows if is_stack else -(-rows // ranks))
            for p, each in zip(params, [stack] if is_stack else stack, strict=True):
                self.state[p][name] = each[: len(p)]
            stacks.append(stack)
        if not is_stack:
            return [(group, slice(None), *stacks)]
        n = max(1, MOST // math.prod(params[0].shape[1:]))
        return [(group, slice(i, i + n), *(stack[i : i + n] for stack in stacks))
                for i in range(0, len(stacks[0]), n)]

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.batches = []  # to be made again

    def orthogonalize(self, stacks: list[Tensor]) -> list[Tensor]:
        """Matrices X [n, rows, columns] of one smaller side → about U V^T, X = U S V^T by SVD.

        X is divided by the root of the norm of X X^T (X^T X if tall), no less than the largest
        singular value. All products but the last need only X X^T. The last multiplies X by
        factor I + rest, kept apart: in bf16 a large diagonal would round off everything beside it.
        """
        tall = [x.shape[1] > x.shape[2] for x in stacks]
        gram = torch.cat([x.mT @ x if t else x @ x.mT for x, t in zip(stacks, tall, strict=True)])
        size = torch.linalg.vector_norm(gram, dim=(1, 2), keepdim=True) + 1e-14
        gram = gram / size
        (a, b, c), *more = self.polynomials
        p = rest = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor = a
        for following in more:
            for _ in range(2):
                gram = torch.baddbmm(gram, p, gram, beta=a)
            a, b, c = following
            p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            rest = torch.baddbmm(rest, p, rest, beta=a).add_(p, alpha=factor)
            factor *= a
        parts = (x.split([len(stack) for stack in stacks]) for x in (rest, size.rsqrt()))
        return [torch.baddbmm(x, *((x, r) if t else (r, x)), beta=factor).mul_(scale)
                for x, t, r, scale in zip(stacks, tall, *parts, strict=True)]

    def orthogonalize_some(self, g: Tensor) -> Tensor:
        """As `orthogonalize`; each rank does its part of the n matrices and sends it to all."""
        each = -(-len(g) // self.helpers)
        (mine,) = self.orthogonalize([g[dist.get_rank() * each :][:each]])
        whole = g.new_empty(self.helpers * each, *g.shape[1:])
        dist.all_gather(list(whole.split(each)), padded(mine, 0, each))
        return whole[: len(g)]

    def orthogonalize_together(self, rows: Tensor, n_rows: int) -> Tensor:
        """This rank's rows of n matrices [n, rows, columns] → its rows of the orthogonalized ones.

        Each rank gets equally many whole matrices, the last ones zeros if ranks do not divide n.
        """
        ranks, (n, each, columns) = self.shards.size, rows.shape
        sent = padded(rows, 0, -(-n // ranks) * ranks).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.shards.group)
        matrices = received.view(ranks, -1, each, columns).transpose(0, 1).flatten(1, 2)
        (whole,) = self.orthogonalize([matrices[:, :n_rows]])
        whole = padded(whole, 1, ranks * each).unflatten(1, (ranks, each))
        dist.all_to_all_single(received, whole.transpose(0, 1).flatten(0, 1),
                               group=self.shards.group)
        return received[:n]


def whole_rows(p: Tensor) -> int:
    """The rows of a whole parameter; this rank may hold only some."""
    return getattr(p, "whole_rows", len(p))


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """x, with zeros at the end of a dimension if it is shorter than length."""
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def stacked(parts: list[Tensor], rows: int) -> Tensor:
    """A copy of n matrices, or of a single stack, as [n, rows, columns], padded with zero rows."""
    return padded(torch.stack(parts) if parts[0].ndim == 2 else parts[0].clone(), 1, rows)


def average(grads: list[Tensor], momentum: Tensor, weight: float, divisor: Tensor | None,
            go: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Updates momentum [n, rows, columns] in place; returns Nesterov's look-ahead in dtype."""
    grad = stacked(grads, momentum.shape[1])
    if divisor is not None:
        grad = grad.mul_(1 / divisor).nan_to_num_(0.0, 0.0, 0.0)
    momentum.lerp_(grad, (1 - weight) * go)
    return grad.lerp_(momentum, weight).to(dtype)


RMS = 0.2  # of an update, as with AdamW (arXiv:2502.16982, section 2.2)


def apply(params: list[Tensor], direction: Tensor, squares: Tensor, beta2: float,
          rate: float | Tensor, decay: float | Tensor, go: float | Tensor):
    """Moves params by rate times their part of direction [n, rows, columns], its rows normalized.

    squares [n, rows, 1]: running means of the squares of each row, updated in place.
    """
    direction = direction.to(params[0].dtype)
    mean = torch.linalg.vector_norm(direction, dim=2, keepdim=True).square_() / direction.shape[2]
    squares.lerp_(mean, (1 - beta2) * go)
    torch._foreach_mul_(params, 1 - decay * go)
    direction *= (squares + 1e-16).rsqrt_() * (RMS * rate * go)
    moves = [direction] if params[0].ndim == 3 else [*direction[:, : len(params[0])].unbind()]
    torch._foreach_sub_(params, moves)
