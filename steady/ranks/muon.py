"""The Muon optimizer: momentum, orthogonalized by polynomials of it, for matrices.

Keller Jordan 2024, kellerjordan.github.io/posts/muon; rows normalized as in arXiv:2510.05491.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

WORTH_SENDING = 2**22  # numbers in a stack; smaller ones are done sooner than sent

# a x + b x³ + c x⁵, one after the other, bring singular values from 0.01 to 1 into 0.69 to 1.27:
# the best that three can do (Polar Express, arXiv:2505.16932, algorithm 1), but of x / 1.02, since
# beyond 1, as bf16 rounds, they diverge: of one dominant direction to 18. Four of Muon's first
# coefficients (3.4445, -4.7750, 2.0315) need a third more products for the same loss.
POLAR = ((7.9347, -22.2581, 15.8015), (3.5653, -2.5649, 0.4860), (2.6091, -1.8631, 0.4099))


class Muon(torch.optim.Optimizer):
    """Muon with updates of the size of AdamW's, so that both take the same learning rate.

    Matrices of one shape are orthogonalized together, in a dtype that the device multiplies
    fast, and non-finite gradients are skipped on the device. Then each row is divided by the root
    of a running mean of its squares, so that all rows move alike (NorMuon, arXiv:2510.05491).

    Several ranks share the work (shards: parallel.Shards). Where each holds some rows of every
    matrix, an all-to-all gives each rank some whole matrices to orthogonalize, and another one
    brings the rows back; where all hold the same matrices on one host, each does some of them.
    """

    _step_supports_amp_scaling = True  # reads grad_scale and found_inf, as fused AdamW does
    by_rows = True  # given `shards`, it works where a rank holds some rows: see parallel.Shards

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.9,
                 beta2: float = 0.95, dtype: torch.dtype = torch.float32, polynomials=POLAR,
                 shards=None):
        self.dtype, self.polynomials = dtype, polynomials  # of the orthogonalization
        self.shards = shards if shards and shards.size > 1 else None
        self.helpers = shards.helpers if shards else 1
        self.grad_scale = self.found_inf = None
        self.average, self.apply, self.compiled = average, apply, False
        self.stacks = []  # of each group: momenta and row_squares
        ranks, given, groups = self.shards.size if self.shards else 1, list(params), []
        for group in given if given and isinstance(given[0], dict) else [dict(params=given)]:
            by_shape = {}
            for p in group["params"]:
                by_shape.setdefault((whole_rows(p), p.shape[1]), []).append(p)
            for (rows, columns), same in by_shape.items():
                # stacks of at most 2^24 numbers a rank, of which a step makes several copies, but
                # of as many matrices for each rank: one that has none waits for the others
                n = ranks * max(1, 2**24 // (rows * columns))
                groups += [group | dict(params=same[i : i + n]) for i in range(0, len(same), n)]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum,
                                      beta2=beta2))

    def compile(self):
        """Make one pass over memory of each function that is not a product."""
        sizes = {(len(group["params"]), group["params"][0].shape) for group in self.param_groups}
        limits = torch.compiler.config  # each size is compiled by itself; beyond it all is eager
        limits.recompile_limit = max(limits.recompile_limit, 2 * len(sizes))
        self.average = torch.compile(average, dynamic=False)
        self.apply = torch.compile(apply, dynamic=False)
        self.compiled = True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.stacks:
            self.stacks = [self.stack_state(group["params"]) for group in self.param_groups]
        for group, (momentum, squares) in zip(self.param_groups, self.stacks, strict=True):
            params, lr = group["params"], group["lr"]
            if self.compiled:
                lr = torch.tensor(lr)  # on the CPU; as a number, each would be compiled anew
            rows = whole_rows(params[0])
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            direction = self.average(grads, momentum, group["momentum"], self.grad_scale,
                                     self.found_inf, self.dtype)
            if self.shards:
                direction = self.orthogonalize_together(direction, rows)
            elif self.helpers > 1 and direction.numel() >= WORTH_SENDING:
                direction = self.orthogonalize_some(direction)
            else:
                direction = self.orthogonalize(direction)
            self.apply(params, direction, squares, group["beta2"], lr, lr * group["weight_decay"],
                       self.found_inf)

    def stack_state(self, params: list[Tensor]) -> list[Tensor]:
        """Momenta [n, rows, columns] and means of squares [n, rows, 1] of a group.

        The state of each matrix is a view of them.
        """
        ranks, stacks = self.shards.size if self.shards else 1, []
        for name, shape in (("momentum", slice(None)), ("row_squares", slice(1))):
            first = [self.state[p].get(name, torch.zeros_like(p[:, shape])) for p in params]
            stacks.append(stacked(first, -(-whole_rows(params[0]) // ranks)))
            for p, each in zip(params, stacks[-1], strict=True):
                self.state[p][name] = each[: len(p)]
        return stacks

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.stacks = []  # to be made again

    def orthogonalize(self, g: Tensor) -> Tensor:
        """g [n, rows, columns] → about U V^T of each matrix, where U S V^T is its SVD."""
        tall = g.shape[1] > g.shape[2]
        x = g.mT if tall else g
        x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
        for a, b, c in self.polynomials:
            square = x @ x.mT
            polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
            polynomial.diagonal(dim1=1, dim2=2).add_(a)
            x = polynomial @ x
        return x.mT if tall else x

    def orthogonalize_some(self, g: Tensor) -> Tensor:
        """As `orthogonalize`; each rank does its part of the n matrices and sends it to all."""
        each = -(-len(g) // self.helpers)
        mine = g[dist.get_rank() * each :][:each]
        part = g.new_zeros(each, *g.shape[1:])
        if len(mine):
            part[: len(mine)] = self.orthogonalize(mine)
        whole = g.new_empty(self.helpers * each, *g.shape[1:])
        dist.all_gather(list(whole.split(each)), part)
        return whole[: len(g)]

    def orthogonalize_together(self, rows: Tensor, n_rows: int) -> Tensor:
        """This rank's rows of n matrices [n, rows, columns] → those of the orthogonalized ones.

        Each rank gets whole matrices, about n / ranks of them.
        """
        (n, each, columns), size = rows.shape, self.shards.size
        counts = [(n + size - 1 - rank) // size for rank in range(size)]
        mine = counts[self.shards.rank]
        sent = [count * each * columns for count in counts]
        received = [mine * each * columns] * size
        matrices = rows.new_empty(sum(received))
        dist.all_to_all_single(matrices, rows.reshape(-1), received, sent, group=self.shards.group)
        matrices = matrices.view(size, mine, each, columns).transpose(0, 1).flatten(1, 2)
        if mine:
            whole = self.orthogonalize(matrices[:, :n_rows])
            matrices = F.pad(whole, (0, 0, 0, size * each - n_rows))
        matrices = matrices.unflatten(1, (size, each)).transpose(0, 1).reshape(-1)
        out = torch.empty_like(rows)
        dist.all_to_all_single(out.view(-1), matrices, sent, received, group=self.shards.group)
        return out


def whole_rows(p: Tensor) -> int:
    """The rows of a parameter of which this rank may hold only some."""
    return getattr(p, "whole_rows", len(p))


def stacked(parts: list[Tensor], rows: int) -> Tensor:
    """[n, rows, columns] of n matrices, with zeros added where a last rank has fewer rows."""
    stack = torch.stack(parts)
    return F.pad(stack, (0, 0, 0, rows - stack.shape[1])) if rows > stack.shape[1] else stack


def average(grads: list[Tensor], momentum: Tensor, weight: float, divisor: Tensor | None,
            found_inf: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Updates momentum [n, rows, columns] in place; returns Nesterov's look-ahead in dtype."""
    grad, go = stacked(grads, momentum.shape[1]), 1.0
    if found_inf is not None:
        grad = grad.div_(divisor).nan_to_num_(0.0, 0.0, 0.0)
        go = 1.0 - found_inf  # 0 skips the step
    momentum.lerp_(grad, (1 - weight) * go)
    return grad.lerp_(momentum, weight).to(dtype)


RMS = 0.2  # of an update, as AdamW's (arXiv:2502.16982, section 2.2)


def apply(params: list[Tensor], direction: Tensor, squares: Tensor, beta2: float,
          rate: float | Tensor, decay: float | Tensor, found_inf: Tensor | None):
    """Moves params by rate times their part of direction [n, rows, columns], its rows normalized.

    squares [n, rows, 1]: running means of the squares of each row, updated in place; 0 before the
    first step.
    """
    go = 1.0 if found_inf is None else 1.0 - found_inf
    direction = direction.to(params[0].dtype).contiguous()  # so that all ranks add alike
    mean = torch.linalg.vector_norm(direction, dim=2, keepdim=True).square_() / direction.shape[2]
    mean = torch.where(squares > 0, torch.lerp(squares, mean, 1 - beta2), mean)
    squares += (mean - squares) * go
    torch._foreach_mul_(params, 1 - decay * go)
    direction *= (mean.sqrt() + 1e-8).reciprocal() * (RMS * rate * go)
    torch._foreach_sub_(params, list(direction[:, : len(params[0])].unbind()))
