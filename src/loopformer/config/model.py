"""The settings of a model: the whole family of k shared blocks, applied L times.

ModelConfig(blocks=2, loops=4)
from_mapping(ModelConfig, {"blocks": 2, "loops": 4}, "model")
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from loopformer.config.schema import check_settings, setting
from loopformer.errors import require

Conditioning = Literal["none", "index", "time", "step", "trajectory"]
FORMAT, VERSION = "loopformer-model", 1  # the mark of our model folders in their config.json
BOX = "box"  # the name of the bundled model
FOURIER_WIDTH = 256  # features of each scalar that conditions a loop


def bundled_model_dir() -> Path:
    """The folder of the bundled model."""
    return Path(str(resources.files("loopformer") / BOX))


@dataclass(frozen=True)
class ModelConfig:
    """Any model of the family. The defaults are the paper's LoopFormer 3⊗8.

    The upper bounds lie far above any model. They keep a damaged file from asking for terabytes.
    """

    conditioning: Conditioning = setting("trajectory", "What a loop knows of its time t and step size Δ.")  # noqa: RUF009
    blocks: int = setting(3, "Blocks in the shared stack (k).", minimum=1, maximum=4096)
    loops: int = setting(8, "Loops of the longest trajectory (L).", minimum=1, maximum=4096)
    width: int = setting(2048, "Width of the residual stream, a multiple of heads.", minimum=1, maximum=1 << 17)
    heads: int = setting(32, "Attention heads.", minimum=1, maximum=1 << 13)
    ffn: int = setting(5120, "Hidden units of the feed-forward layer.", minimum=1, maximum=1 << 20)
    context: int = setting(1024, "Tokens of a sequence.", minimum=1, maximum=1 << 22)
    vocab: int = setting(50257, "Token ids that the model accepts.", minimum=1, maximum=1 << 24)
    padded_vocab: int | None = setting(None, "Rows of the embedding; null rounds vocab up to a multiple of 64.")
    positions: Literal["learned", "rotary"] = setting("learned", "Position embeddings.")
    modulator_start: Literal["zero", "normal", "one"] = setting("zero", "Initial gates: closed, random or open.")
    time_scale: float = setting(1.0, "Factor on t and Δ before their Fourier features.", above=0)
    residual_init: Literal["blocks", "depth"] = setting("blocks", "Residual init std: 0.02/√(2k) or 0.02/√(2kL).")
    inject: Literal["none", "gated", "adapter"] = setting(
        "none", "How loops get the embedding again.", beyond_paper=True
    )
    start: Literal["embedding", "normed", "random"] = setting(
        "embedding", "The state before the first loop.", beyond_paper=True
    )
    norms: Literal["pre", "sandwich"] = setting(
        "pre", "Where norms stand; sandwich: also after each sum.", beyond_paper=True
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} must be a multiple of model.heads {self.heads}.",
        )
        require(
            self.positions != "rotary" or self.head_width % 2 == 0,
            "Rotary positions need an even width/heads; change model.heads.",
        )
        require(
            self.inject != "gated" or self.conditioning != "none",
            "model.inject gated needs a conditioning; give model.conditioning another value than none.",
        )
        require(
            self.start != "random" or self.inject == "adapter",
            "With model.start random the tokens only enter by injection; set model.inject to adapter.",
        )
        require(
            self.vocab_rows >= self.vocab,
            f"model.padded_vocab {self.padded_vocab} is smaller than model.vocab {self.vocab}; raise it.",
        )

    def plain(self) -> dict[str, Any]:
        """The settings as files hold them, without those beyond the paper that have their defaults.

        So a model of the paper has the same file and the same hash in every version.
        """
        known = [field.name for field in dataclasses.fields(self) if "beyond_paper" not in field.metadata]
        return {name: getattr(self, name) for name in (*known, *self.non_paper_settings)}

    @property
    def non_paper_settings(self) -> list[str]:
        """The settings beyond the paper that are not at their defaults."""
        known = [field for field in dataclasses.fields(self) if "beyond_paper" in field.metadata]
        return [field.name for field in known if getattr(self, field.name) != field.default]

    @property
    def fused_unsupported(self) -> str | None:
        """The setting that the fused decoding kernels do not support, if any."""
        fused = {"inject": self.inject == "gated", "start": self.start == "normed" and self.positions == "rotary"}
        return next((name for name in self.non_paper_settings if not fused.get(name)), None)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and width of the logits."""
        return self.padded_vocab if self.padded_vocab is not None else -(-self.vocab // 64) * 64

    @property
    def head_width(self) -> int:
        return self.width // self.heads
