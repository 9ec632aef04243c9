"""The settings of a model as Transformers knows them.

    config = LoopFormerConfig(model=ModelConfig(blocks=2, loops=4), budget=2)
    config.settings, config.hidden_size, config.num_hidden_layers

`model` holds the fields of our ModelConfig, and `format` and `version` mark the folder as one of ours, so the one
config.json serves `from_pretrained` and `loopformer.load` alike. `budget` or `trajectory` is what the model follows
where a call does not say: tools that only pass settings on can choose with `from_pretrained(folder, budget=4)`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from loopformer.config.model import FORMAT, VERSION, ModelConfig, from_mapping
from loopformer.errors import require


class LoopFormerConfig(PretrainedConfig):  # type: ignore[misc]
    """A LoopFormer k⊗L. What Transformers' tools ask for (`hidden_size` and such) follows from `model`."""

    model_type = "loopformer"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        model: ModelConfig | Mapping[str, Any] | None = None,
        budget: int | None = None,
        trajectory: str | None = None,
        source: Mapping[str, Any] | None = None,
        format: str = FORMAT,
        version: int = VERSION,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        require(
            (format, version) == (FORMAT, VERSION),
            f"The model is a {format!r} of version {version!r}, this code reads {FORMAT!r} {VERSION}; update it.",
        )
        require(tie_word_embeddings, "A LoopFormer's head is its token embedding; leave tie_word_embeddings true.")
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        settings = model if isinstance(model, ModelConfig) else from_mapping(ModelConfig, model or {}, "model")
        self.model = settings.plain()
        self.budget, self.trajectory = budget, trajectory
        self.source = dict(source or {})
        self.format, self.version = format, version
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As usual; a budget or trajectory that is asked for here takes the place of the file's own."""
        depth = {"budget": None, "trajectory": None}
        new = [name for name in depth if kwargs.get(name) is not None]
        require(len(new) < 2, "Give a budget or a trajectory, not both.")
        return super().from_dict({**config_dict, **depth} if new else config_dict, **kwargs)

    @property
    def settings(self) -> ModelConfig:
        """`model`, checked."""
        return from_mapping(ModelConfig, self.model, "model")

    @property
    def num_hidden_layers(self) -> int:
        """Layers of a cache: one per loop and block."""
        return self.settings.blocks * self.settings.loops

    @property
    def hidden_size(self) -> int:
        return self.settings.width

    @property
    def intermediate_size(self) -> int:
        return self.settings.ffn

    @property
    def num_attention_heads(self) -> int:
        return self.settings.heads

    @property
    def num_key_value_heads(self) -> int:
        return self.settings.heads

    @property
    def head_dim(self) -> int:
        return self.settings.head_width

    @property
    def max_position_embeddings(self) -> int:
        return self.settings.context

    @property
    def vocab_size(self) -> int:
        """Ids the model knows; the embedding may have more rows, which are never chosen."""
        return self.settings.vocab
