"""What a model is: the settings of the whole family, k⊗L."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loopformer.config.schema import check_types, require

FORMAT, VERSION = "loopformer-model", 1  # how the config.json of a model folder says that it is ours

Conditioning = Literal["none", "index", "time", "step", "trajectory"]


@dataclass(frozen=True)
class ModelConfig:
    """Any model of the family, k⊗L. The defaults are the paper's LoopFormer 3⊗8."""

    conditioning: Conditioning = "trajectory"  # what a pass is told: nothing, its index, t, Δ, or (t, Δ)
    blocks: int = 3  # k, blocks in the shared stack
    loops: int = 8  # L, passes of the longest trajectory
    width: int = 2048  # d
    heads: int = 32
    ffn: int = 5120
    context: int = 1024
    vocab: int = 50257  # ids the model accepts
    padded_vocab: int | None = None  # rows of the embedding; None: `vocab` rounded up to a multiple of 64
    positions: Literal["learned", "rotary"] = "learned"
    modulator_start: Literal["zero", "normal", "one"] = "zero"
    time_scale: float = 1.0  # multiplies t and Δ before their Fourier features
    residual_init: Literal["blocks", "depth"] = "blocks"  # residual projections start at 0.02/√(2k) or /√(2kL)

    def __post_init__(self) -> None:
        check_types(self, "model")
        for name in ("blocks", "loops", "width", "heads", "ffn", "context", "vocab"):
            require(getattr(self, name) >= 1, f"model.{name} must be 1 or more, got {getattr(self, name)}.")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} must be a multiple of model.heads {self.heads}.",
        )
        if self.positions == "rotary":
            require(
                self.width // self.heads % 2 == 0,
                "Rotary positions need an even width/heads; change model.heads.",
            )
        require(self.time_scale > 0, f"model.time_scale must be positive, got {self.time_scale}.")
        require(
            self.padded_vocab is None or self.padded_vocab >= self.vocab,
            f"model.padded_vocab {self.padded_vocab} is smaller than model.vocab {self.vocab}.",
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and width of the logits."""
        return self.padded_vocab if self.padded_vocab is not None else -(-self.vocab // 64) * 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads
