"""Sharding: the part of the model on each rank.

With --parallel ddp every rank holds all of it. zero2 and zero3 (arXiv:1910.02054) shard it with
PyTorch's `fully_shard`: of every weight, its gradient and its optimizer state, each rank holds some
rows. Whole weights exist for a block at a time, gathered from all ranks: with zero3 for each
forward and each backward pass, with zero2 once a step.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from steady import private
from steady.options import ConfigError
from steady.ranks.muon import Muon
from steady.ranks.ranks import FOR_EVER, rank_and_world


class Shards:
    """The placement of weights on ranks: this one, `rank` of `size`, holds its rows of each weight.

    size 1: it holds all rows. replicas: copies of the model, so as many ranks hold the same rows.
    """

    def __init__(self, way: str = "ddp", world_size: int = 1, shard_size: int = 0,
                 device_type: str = "cpu"):
        """shard_size: ranks that hold one copy of the model, 0: all of them. Raises ConfigError."""
        if shard_size and world_size > 1 and world_size % shard_size:
            raise ConfigError(f"--shard_size {shard_size}: expected a divisor of the {world_size} "
                              "processes")
        self.way, self.mesh, self.group = way, None, None
        self.rank, self.size, self.replicas = 0, 1, 1
        # ranks with the same weights that are quick to reach: of ddp on a single host
        self.helpers = world_size if way == "ddp" and rank_and_world()[3] == world_size else 1
        self.pairs = []  # (parameter of the sharded model, this rank's rows of it)
        self.parameters, self.frozen, self.model, self.whole = {}, [], None, set()  # see `hold`
        self.missing = Counter()  # of a step, if sharded: {weight: passes without its gradient}
        if way == "ddp" or world_size == 1 or shard_size == 1:
            return
        size, mesh, groups = shard_size or world_size, torch.arange(world_size), [dist.group.WORLD]
        if size < world_size:
            mesh = mesh.view(-1, size)  # each row has the ranks that hold one copy
            groups = [dist.new_subgroups_by_enumeration(ranks.tolist(), FOR_EVER)[0]
                      for ranks in (mesh.T, mesh)]
        self.mesh = DeviceMesh.from_group(
            groups, device_type, mesh, mesh_dim_names=("replicas", "shards")[-len(groups):])
        self.group, self.size, self.replicas = groups[-1], size, world_size // size
        self.rank = dist.get_rank(self.group)

    def rows(self, n: int) -> slice:
        """This rank's rows of n: all ranks have equally many, except the last ones."""
        each = -(-n // self.size)
        return slice(min(n, self.rank * each), min(n, (self.rank + 1) * each))

    def shard(self, model: nn.Module, dtype: torch.dtype):
        """Shard a model in place, even on the meta device; its `forward` then gathers.

        Each block is a unit of its own, gathered in dtype, as under autocast, and so is the head,
        during the last block. Embedding and last norm are gathered in fp32, so that the residual
        stream equals ddp's; so is a tied head, or another model's, as it may never be called.
        """
        if self.size == 1:
            return
        # here, for runs that need it: the import takes half as long as torch's own
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = None if dtype == torch.float32 else dtype
        # cast_forward_inputs would round the rotary tables
        outside = MixedPrecisionPolicy(cast_forward_inputs=False)
        inside = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        again = self.way == "zero3"
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, reshard_after_forward=again, mp_policy=inside)
        if model.embedding.weight is not model.head.weight:
            fully_shard(model.embedding, mesh=self.mesh, reshard_after_forward=again,
                        mp_policy=outside)
            if getattr(model.head, "always_called", False):
                fully_shard(model.head, mesh=self.mesh, reshard_after_forward=False,
                            mp_policy=inside)
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False, mp_policy=outside)

    @torch.no_grad()
    def hold(self, model: nn.Module) -> "Shards":
        """Name this rank's part of a finished model, in the memory of the model itself.

        parameters: this rank's part of each trained one, for the optimizers, with the number of all
        rows as `whole_rows`. whole: the names in model.state_dict() of tensors not sharded.
        """
        for unit in units(model):  # the first gathering moves the rows to their final place
            unit.unshard()
            for name, p in model.named_parameters():
                if p.requires_grad and local_part(p) is p:
                    p.register_post_accumulate_grad_hook(
                        lambda _, name=name: self.missing.subtract([name]))
            unit.reshard()
        self.model = model
        self.whole = {name for name, x in model.state_dict().items() if local_part(x) is x}
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        for name, whole in self.parameters.items() if self.size > 1 else ():
            part = self.parameters[name] = nn.Parameter(whole.to_local())
            part.whole_rows = len(whole)
            self.pairs.append((whole, part))
        return self

    def tensors_of(self, model: nn.Module) -> dict[str, Tensor]:
        """This rank's part of model.state_dict() now, to be read and written in place."""
        return {name: local_part(tensor) for name, tensor in model.state_dict().items()}

    def checked(self, optimizers: list, lr: float) -> list:
        """The same optimizers. Raises ConfigError unless each trained weight is in exactly one.

        Each group's rate must be `lr`; sharded, each class in BY_ROWS or its `by_rows` true.
        """
        wholes = {id(part): whole for whole, part in self.pairs}
        groups = [group for each in optimizers for group in each.param_groups]
        held = Counter(id(p) for group in groups for p in group["params"])
        for name, p in self.parameters.items():
            if p.requires_grad and (held[id(p)] != 1 or not wholes.get(id(p), p).requires_grad):
                raise ConfigError(f"make_optimizers: {held[id(p)]} optimizers have {name}; expected"
                                  " one, and no change of requires_grad: freeze it in make_model")
        if held.keys() - {id(p) for p in self.parameters.values()}:
            raise ConfigError("make_optimizers: an optimizer has parameters that the model lacks, "
                              "or has frozen; they would be missing from checkpoints")
        if any(group.get("lr", lr) != lr for group in groups):
            raise ConfigError("make_optimizers: a group has a learning rate of its own; expected "
                              "lr=cfg.learning_rate, and `lr_scale` for a multiple of it")
        for optimizer in optimizers if self.size > 1 else ():
            if type(optimizer) not in BY_ROWS and not getattr(optimizer, "by_rows", False):
                raise ConfigError(f"--parallel {self.way}: {type(optimizer).__name__} may need "
                                  "whole weights, of which each rank has some rows; expected "
                                  "--parallel ddp, or `by_rows = True` if it treats each row alone")
        return optimizers

    def scaler(self, device_type: str, enabled: bool) -> torch.amp.GradScaler:
        """The scaler of fp16: one scale for all ranks, although each looks at its own gradients."""
        if self.size == 1 or not enabled:
            return torch.amp.GradScaler(device_type, enabled=enabled)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device_type, process_group=self.group)

    def move_gradients(self, model: nn.Module):
        """Move the gradients of the wrapped model's parameters to the parts.

        Raises RuntimeError if a weight was unfrozen, or if a pass left one out: then DDP has not
        reduced the gradients, and zero2 and zero3 may have mixed up those of equal shapes.
        """
        if any(p.requires_grad for p in self.frozen):
            raise RuntimeError("a frozen weight requires a gradient now; freeze it by a rate of 0")
        private.require_reduced(model)
        if unused := list(+self.missing):
            raise RuntimeError(f"{len(unused)} weights, such as {unused[0]}, got no gradient in a "
                               "pass: each rank must use all; multiply by 0 instead of skipping")
        self.missing.clear()
        for whole, part in self.pairs:
            if whole.grad is not None:
                part.grad, whole.grad = whole.grad.to_local(), None

    def micro_batch(self, model: nn.Module, last: bool):
        """Around a forward and backward pass, the last one of a step or an earlier one.

        ddp reduces the gradients over the ranks in the last one alone. zero2 and zero3 reduce them
        in each, or every rank would hold all of them; zero2 keeps the whole weights in between.
        """
        if self.size > 1:
            self.missing.update(self.parameters.keys())
        if self.way == "zero2" and self.size > 1:
            model.set_reshard_after_backward(last)
        if self.replicas > 1:
            model.set_requires_all_reduce(last)
        if last or not hasattr(model, "no_sync"):
            return contextlib.nullcontext()
        return model.no_sync()

    def norms(self, parts: list[Tensor]) -> Tensor:
        """The norms of the whole tensors, [n], on every rank: one collective."""
        norms = torch.stack(torch._foreach_norm(parts))
        if self.size == 1:
            return norms
        squares = norms.float().square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


# torch's optimizers that update each element by itself
BY_ROWS = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax,
           optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's rows, of a tensor that fully_shard has sharded (a DTensor) or not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def units(model: nn.Module) -> list[nn.Module]:
    """The modules of a sharded model, each gathered as a whole."""
    return [module for module in model.modules() if hasattr(module, "unshard")]


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """For calling methods of a sharded model past its hooks, on all ranks together.

    Gathers the weights outside its blocks and head; these gather their own. Nothing compiled runs
    meanwhile: growing lengths, as in generation, would be compiled again and again.
    """
    compiled = "forward" in vars(model.head)
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    if hasattr(model, "unshard"):
        model.unshard()
    try:
        with eager:  # imports the compiler, so only if needed
            yield
    finally:
        release(model)


def compile_in_place(model: nn.Module, optimizers: list, lengths_vary: bool, world_size: int):
    """Compile the model and, on CUDA, Muon; names in checkpoints stay the module's.

    With several ranks, compile the block (one graph serves all) and the loss: the collectives
    between the blocks cannot be compiled, and in one graph they would wait for the end of the
    backward pass.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, Muon) and next(model.parameters()).is_cuda:
            optimizer.compile()
    how = dict(dynamic=True if lengths_vary else None)
    if world_size == 1:
        return model.compile(**how)
    private.keep_graphs_whole()
    for part in (*model.blocks, model.head):
        if part is not model.head or getattr(part, "always_called", False):
            part.forward = torch.compile(part.forward, **how)


def release(model: nn.Module):
    """Free the whole weights that a forward pass without a backward pass leaves."""
    for unit in units(model):
        unit.reshard()


# Methods that overwrite a whole tensor, besides the functions of torch.nn.init.
FILLS = ("normal_", "uniform_", "bernoulli_", "exponential_", "zero_", "fill_", "copy_")


@contextlib.contextmanager
def all_set(model: nn.Module, buffers: bool) -> Iterator[None]:
    """Raises ConfigError, at its end, for parameters (and buffers) that were not set within it.

    Values set by a module's `__init__` are lost: see `Initializer`.
    """
    def tensors() -> dict[str, Tensor]:
        found = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
        return {name: local_part(tensor.detach()) for name, tensor in found}

    for tensor in tensors().values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    before = {name: (t.data_ptr(), t._version) for name, t in tensors().items()}
    yield
    left = [name for name, t in tensors().items()
            if (t.isnan().any() if t.is_floating_point()  # may be set in part
                else before.get(name) == (t.data_ptr(), t._version))]
    if left:
        others = f" and {len(left) - 1} others" if len(left) > 1 else ""
        raise ConfigError(f"init_weights: does not set {left[0]}{others}; set it there: values "
                          "given in __init__ are discarded")


class Initializer(TorchFunctionMode):
    """While active, a parameter is initialized as if it were not sharded, whatever the ranks.

    Each is drawn whole on the CPU, one at a time, from the same generator on every rank; the rank
    then keeps its rows. Without shards, parameters stay as they are, to be set later.
    """

    def __init__(self, shards: Shards | None):
        self.shards = shards

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "tensor" in kwargs:  # as torch.nn.init names it
            args = kwargs.pop("tensor"), *args
        target, name = args[0] if args else None, function.__name__
        sharded = hasattr(target, "to_local")  # its rows are a gathered copy, or drawn by each rank
        if sharded and (name == "__setitem__" or name.startswith("rand") or name.endswith("_")
                        and not name.endswith("__") and target.placements[-1].is_replicate()):
            raise ConfigError(f"init_weights: {name} on some rows of a sharded weight would be "
                              "lost or differ; set all of it, as with weight.copy_(values)")
        fills = getattr(function, "__module__", None) == "torch.nn.init" or name in FILLS
        if not (fills and (sharded or isinstance(target, nn.Parameter))):
            return function(*args, **kwargs)
        if self.shards:
            whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
            others = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in args[1:])
            function(whole, *others, **kwargs)
            part = local_part(target.detach())
            part.copy_(whole if part.shape == whole.shape else whole[self.shards.rows(len(whole))])
        return target


def distribute(model: nn.Module, device: torch.device, world_size: int,
               deterministic: bool) -> nn.Module:
    """Wrap the finished model for training on several ranks, unless it is sharded."""
    if world_size == 1 or hasattr(model, "unshard"):
        return model
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False  # they are constants: do not send them every step
    private.no_timing(wrapped)
    if device.type == "cpu" or deterministic:  # a GPU saves time by the order of gradients
        private.fix_buckets(wrapped)
    return wrapped
