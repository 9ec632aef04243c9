"""Ranks, and the wrappers that let several ranks train one model.

    torchrun --nproc-per-node 8 -m loopformer train CONFIG

Under torchrun every process is a rank; otherwise there is a single rank. DDP keeps a full model on each rank. FSDP2
shards weights and optimizer state. The shared stack is one unit, which stays gathered over the loops.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from loopformer.device import choose_device

if TYPE_CHECKING:  # for types only: modules that need Ranks do not need the objective
    from loopformer.training.objective import Objective


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, the number of ranks, and collective operations that every rank must call."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def start(cls, device: str = "auto") -> Ranks:
        """Join the other ranks if torchrun started this process, and choose a device."""
        world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        chosen = choose_device(device, local)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        if world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
        return cls(dist.get_rank() if world > 1 else 0, world, chosen)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on all ranks."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def smallest(self, value: int) -> int:
        if self.world > 1:
            smallest = torch.tensor(value, device=self.device)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            return int(smallest)
        return value

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.world > 1 and dist.is_initialized():
            # Gloo's threads may still be releasing tensors, for which they need the interpreter lock. Destroying
            # the group while this thread holds the lock would deadlock. A barrier gives them the time.
            dist.barrier()
            dist.destroy_process_group()


class Parallel:
    """An objective wrapped for its ranks. Gradients are averaged over ranks in the last micro-batch of a step."""

    def __init__(self, objective: Objective, ranks: Ranks, sharded: bool) -> None:
        self.ranks, self.objective = ranks, objective
        self.is_sharded = ranks.world > 1 and sharded
        self.module: nn.Module = objective
        if self.is_sharded:
            # A mesh defaults to the GPU wherever there is one, even for ranks that train on the CPU.
            mesh = init_device_mesh(ranks.device.type, (ranks.world,))
            stack = fully_shard(objective.model.stack, mesh=mesh, reshard_after_forward=False)
            stack.set_reshard_after_backward(False)  # backward needs the weights for every loop
            # After the stack: the root unit takes all other weights. The tied embedding is used first and last.
            fully_shard(objective, mesh=mesh, reshard_after_forward=False)
            register_fsdp_forward_method(objective, "logprobs")  # so that validation gathers the weights, too
        elif ranks.world > 1:
            devices = None if ranks.device.type == "cpu" else [ranks.device]
            # With one loop nothing is injected, so the injection has no gradient. DDP would wait for it.
            unused = objective.model.config.inject == "gated"
            self.module = DistributedDataParallel(objective, device_ids=devices, find_unused_parameters=unused)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Exchange gradients only in the last micro-batch of a step."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        yield

    def before_update(self) -> None:
        """Release gathered weights. The optimizer changes the shards, so the next forward must gather again."""
        stack = self.objective.model.stack
        if isinstance(stack, FSDPModule):
            stack.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded. Every rank must call this, because gathering is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
