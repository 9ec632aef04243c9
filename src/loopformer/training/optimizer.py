"""AdamW for every parameter, or Muon for the matrices of the blocks and AdamW for the rest, on a cosine schedule.

    optimizer = ModelOptimizer(model, run.training, fused=True)
    optimizer.set_rate(learning_rate(step, run.training))      # steps count from 1
    optimizer.step()

Muon updates a matrix by its orthogonalised momentum, so that all its directions learn at the same rate. Queries,
keys and values are three matrices in one parameter and are orthogonalised one by one. Embeddings, vectors and the
conditioner stay with AdamW.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from loopformer.config import TrainingConfig
from loopformer.model.block import Attention, FeedForward
from loopformer.training.distributed import full_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
MOMENTUM = "momentum_buffer"  # Muon's


class ModelOptimizer:
    """The optimizers of a model under one learning rate schedule."""

    def __init__(self, model: nn.Module, config: TrainingConfig, fused: bool, capturable: bool = False) -> None:
        """`fused` runs AdamW in fused kernels.

        With `capturable` a CUDA graph can hold a step: rates and counts are tensors on the device of the weights.
        """
        self.config, self.fused, self.capturable = config, fused, capturable
        matrices = block_matrices(model) if config.optimizer == "muon" else {}
        rest = [p for p in model.parameters() if p.requires_grad and p not in matrices]
        decay = 0.0 if matrices else config.weight_decay  # with Muon only its matrices decay
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (config.beta1, config.beta2)
        self.adamw = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=betas, fused=fused, capturable=capturable
        )
        self.muon = BlockMuon(matrices, config.matrix_learning_rate, config.weight_decay) if matrices else None

    def set_rate(self, rate: float) -> None:
        """Set AdamW's learning rate; Muon's follows in proportion."""
        self._set_rate(self.adamw, rate)
        if self.muon is not None:
            self._set_rate(self.muon, self.config.matrix_learning_rate * rate / self.config.learning_rate)

    def _set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            if not self.capturable:
                group["lr"] = rate
                continue
            if not isinstance(group["lr"], Tensor):
                group["lr"] = torch.zeros((), device=group["params"][0].device)
            group["lr"].fill_(rate)  # in place: a graph reads this memory, and would miss another tensor

    def step(self, applies: Tensor | None = None) -> None:
        """Update every parameter, with a zero gradient if it has none.

        AdamW counts steps per parameter, and a checkpoint stores a single count for all. If `applies` is false on
        the device, nothing changes; this needs `fused`.
        """
        if applies is not None:
            # The interface of gradient scalers, with which fused AdamW skips a step.
            self.adamw.found_inf = (~applies).float()  # type: ignore[attr-defined]
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(applies=applies)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)
        if self.muon is not None:
            self.muon.zero_grad(set_to_none)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The optimizer's state by kind and parameter name; zeros before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            muon = self.muon is not None and parameter in self.muon.parts
            state = self.muon.state[parameter] if self.muon is not None and muon else self.adamw.state[parameter]
            for kind in (MOMENTUM,) if muon else MOMENTS:
                if kind not in state:
                    state[kind] = torch.zeros_like(parameter)
                tensors[f"{kind}.{name}"] = state[kind]
        return tensors

    def step_counts(self) -> list[Tensor]:
        """AdamW's count of each parameter, once `set_updates` has made them."""
        return [self.adamw.state[p]["step"] for group in self.adamw.param_groups for p in group["params"]]

    def set_updates(self, updates: int) -> None:
        """Set AdamW's step counts. Call it after `tensors`, which creates the state."""
        for group in self.adamw.param_groups:
            for parameter in group["params"]:
                # Fused AdamW reads the count on the parameter's device, plain AdamW on the CPU.
                device = parameter.device if self.fused else torch.device("cpu")
                count = torch.tensor(float(updates), dtype=torch.float32, device=device)
                self.adamw.state[parameter]["step"] = count


class BlockMuon(torch.optim.Muon):
    """torch's Muon for parameters that hold several matrices.

    All matrices of a shape are orthogonalised in one batch. Sharded weights have sharded momentum, and every rank
    computes the full update and applies its own rows.
    """

    def __init__(self, parts: dict[Tensor, int], lr: float, weight_decay: float) -> None:
        """`parts` maps each parameter to the number of matrices stacked in its rows."""
        super().__init__(list(parts), lr=lr, weight_decay=weight_decay)
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: Any = None, applies: Tensor | None = None) -> None:  # type: ignore[override]
        """Update all matrices, or none if `applies` is false on the device."""
        for group in self.param_groups:
            rate = group["lr"] if applies is None else group["lr"] * applies
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._update(parameter, group["momentum"], applies) for parameter in parameters]
            matrices = [
                update.chunk(self.parts[parameter]) for parameter, update in zip(parameters, updates, strict=True)
            ]
            orthogonal = orthogonalise([matrix for parts in matrices for matrix in parts], group)
            for parameter, parts in zip(parameters, matrices, strict=True):
                rows, columns = parts[0].shape
                update = torch.cat(list(islice(orthogonal, len(parts))))
                if isinstance(parameter, DTensor):
                    update = DTensor.from_local(update, parameter.device_mesh, [Replicate()]).redistribute(
                        placements=parameter.placements
                    )
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.sub_(update.float() * (rate * math.sqrt(max(1.0, rows / columns))))

    def _update(self, parameter: Tensor, momentum: float, applies: Tensor | None) -> Tensor:
        """The full gradient with Nesterov momentum, in bf16."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        if applies is not None:  # otherwise the momentum and the update would not be finite either
            gradient = torch.where(applies, gradient, state[MOMENTUM])
        state[MOMENTUM].lerp_(gradient, 1 - momentum)
        return full_tensor(gradient.lerp(state[MOMENTUM], momentum).bfloat16())


def orthogonalise(matrices: list[Tensor], settings: dict[str, Any]) -> Iterator[Tensor]:
    """Each matrix with its singular values brought near 1 by Newton–Schulz steps, one batch for each shape."""
    a, b, c = settings["ns_coefficients"]
    # Tall matrices are transposed, because the Gram matrix of the shorter side is smaller.
    wide = [matrix if len(matrix) <= matrix.shape[1] else matrix.mT for matrix in matrices]
    orthogonal: dict[int, Tensor] = {}
    for shape in dict.fromkeys(matrix.shape for matrix in wide):
        indices = [index for index, matrix in enumerate(wide) if matrix.shape == shape]
        x = torch.stack([wide[index] for index in indices])  # [n, rows, columns]
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=settings["eps"])
        for _ in range(settings["ns_steps"]):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        orthogonal |= dict(zip(indices, x, strict=True))
    for index, matrix in enumerate(matrices):
        yield orthogonal[index] if matrix.shape == orthogonal[index].shape else orthogonal[index].mT


def block_matrices(model: nn.Module) -> dict[Tensor, int]:
    """The parameters of all blocks that Muon updates, and how many matrices each holds."""
    matrices: dict[Tensor, int] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            matrices |= {module.qkv.weight: 3, module.out.weight: 1}
        elif isinstance(module, FeedForward):
            matrices |= {module.up.weight: 1, module.down.weight: 1}
    return matrices


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of a step, counted from 1: linear warmup, then a cosine to the minimum."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * cosine
