"""What a model costs: parameters, FLOPs and bytes at any budget.

    cost = Cost(ModelConfig())               # or model.cost
    cost.forward_flops(budget=4)             # per token, averaged over a full context
    cost.decode_bytes(budget=4, context=512) # read from memory per decoded token at batch 1

A multiply-add is 2 FLOPs, and only matmuls count. Costs depend on the budget, not on step sizes. The
modulation table is computed once per trajectory, so `table_flops` is separate from the cost per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loopformer.config.model import FOURIER_WIDTH, ModelConfig


@dataclass(frozen=True)
class Parameters:
    """The parameters of each part. The head is tied to the token embedding and adds none."""

    tokens: int
    positions: int
    stack: int  # norms and adapter included
    conditioning: int
    final_norm: int

    @property
    def embeddings(self) -> int:
        return self.tokens + self.positions

    @property
    def without_embeddings(self) -> int:
        return self.stack + self.conditioning + self.final_norm

    @property
    def total(self) -> int:
        return self.embeddings + self.without_embeddings


@dataclass(frozen=True)
class Cost:
    """The costs of a model k⊗L as functions of the budget M and the context."""

    config: ModelConfig

    @property
    def block_matmul_params(self) -> int:
        """Matmul weights of one block: 4d² for attention, 2·d·ffn for the FFN."""
        return 4 * self.config.width**2 + 2 * self.config.width * self.config.ffn

    @property
    def adapter_matmul_params(self) -> int:
        """Matmul weights of the adapter, which every loop applies once."""
        return 2 * self.config.width**2 if self.config.inject == "adapter" else 0

    @property
    def head_matmul_params(self) -> int:
        """Matmul weights of the head, including the padding rows of the vocabulary."""
        return self.config.vocab_rows * self.config.width

    @property
    def conditioning_scalars(self) -> int:
        """Scalars that condition a loop: t and Δ, one of them, or none."""
        return {"none": 0, "trajectory": 2}.get(self.config.conditioning, 1)

    @property
    def conditioning_vectors(self) -> int:
        """Vectors [D] that condition a loop: four per block and one for the injection, or none."""
        unconditioned = self.config.conditioning == "none"
        return 0 if unconditioned else 4 * self.config.blocks + (self.config.inject == "gated")

    @property
    def parameters(self) -> Parameters:
        config = self.config
        d = config.width
        norms = 2 * (config.conditioning == "none") + 2 * (config.norms == "sandwich")  # learned ones per block
        embedding = (FOURIER_WIDTH + 1) * d + (d + 1) * d  # a 2-layer MLP per scalar
        modulators = self.conditioning_vectors * d * (d + 1)
        return Parameters(
            tokens=self.head_matmul_params,
            positions=config.context * d if config.positions == "learned" else 0,
            stack=config.blocks * (self.block_matmul_params + norms * d) + self.adapter_matmul_params,
            conditioning=self.conditioning_scalars * embedding + modulators,
            final_norm=d,
        )

    def loop_flops(self, context: int | None = None, causal: bool = True) -> float:
        """FLOPs of one loop per token, averaged over the context. Causal attention computes half of the scores."""
        length = self.config.context if context is None else context
        block = 2 * self.block_matmul_params + 4 * length * self.config.width * (0.5 if causal else 1.0)
        return self.config.blocks * block + 2 * self.adapter_matmul_params

    def forward_flops(self, budget: int | None = None, context: int | None = None, causal: bool = True) -> float:
        """FLOPs per token from embedding to logits."""
        loops = self.config.loops if budget is None else budget
        return 2 * self.head_matmul_params + loops * self.loop_flops(context, causal)

    def prefill_flops(self, tokens: int, budget: int | None = None) -> float:
        """FLOPs to prefill a prompt, with logits for its last token only."""
        loops = self.config.loops if budget is None else budget
        return 2 * self.head_matmul_params + tokens * loops * self.loop_flops(tokens)

    def table_flops(self, budget: int | None = None) -> int:
        """FLOPs of the modulation table, which is computed once per trajectory."""
        d = self.config.width
        embeddings = self.conditioning_scalars * 2 * (FOURIER_WIDTH * d + d * d)
        modulators = self.conditioning_vectors * 2 * d * d
        return (embeddings + modulators) * (self.config.loops if budget is None else budget)

    def training_flops(
        self, context: int | None = None, budgets: Sequence[float] | None = None, causal: bool = True
    ) -> float:
        """FLOPs of forward and backward (twice the forward) per token, summed over one trajectory per budget.

        None means the full budget alone. A budget may be a mean: the paper draws short budgets uniformly from
        1…L-1, so their mean is L/2.
        """
        head, loop = 2 * self.head_matmul_params, self.loop_flops(context, causal)
        return 3 * sum(head + budget * loop for budget in ([self.config.loops] if budgets is None else budgets))

    def training_overhead(self, context: int | None = None) -> float:
        """The cost of training with a short trajectory relative to the full one alone.

        In the paper this is (2·C_io + 3/2·L·C₁) / (C_io + L·C₁), with C_io for the head and C₁ for one loop.
        """
        loops = self.config.loops
        return self.training_flops(context, [loops, loops / 2]) / self.training_flops(context)

    def kv_bytes(self, budget: int | None = None, value_bytes: int = 2) -> int:
        """Bytes of the KV cache per token: one pair of keys and values per (loop, block)."""
        loops = self.config.loops if budget is None else budget
        return loops * self.config.blocks * 2 * self.config.width * value_bytes

    def decode_bytes(self, budget: int | None = None, context: int = 0, value_bytes: int = 2) -> int:
        """Bytes read per decoded token at batch 1: the stack once per loop, the head, and KV of `context` tokens.

        This assumes that the stack does not fit the processor's cache, and that the modulation
        table is already computed.
        """
        loops = self.config.loops if budget is None else budget
        table = self.conditioning_vectors * self.config.width
        weights = loops * (self.parameters.stack + table) + self.head_matmul_params + self.config.width
        return weights * value_bytes + context * self.kv_bytes(budget, value_bytes)
