"""The settings of a model as a Transformers config.

    config = LoopFormerConfig(model=ModelConfig(blocks=2, loops=4), budget=2)
    config.settings, config.hidden_size, config.num_hidden_layers

`model` holds the fields of ModelConfig. `format` and `version` are those of a model folder, so that
`from_pretrained` and `loopformer.load` read the same config.json. `budget` or `trajectory` is the default of calls
that give neither. Tools that cannot pass them to each call set it with `from_pretrained(folder, budget=4)`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from loopformer.config.model import FORMAT, VERSION, ModelConfig, from_mapping
from loopformer.errors import require


class LoopFormerConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a model with a stack of k blocks and up to L loops."""

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
        settings = model if isinstance(model, ModelConfig) else from_mapping(ModelConfig, model or {}, "model")
        self.model = settings.plain()
        self.budget, self.trajectory = budget, trajectory
        self.source = dict(source or {})
        self.format, self.version = format, version
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers. A budget or trajectory in `kwargs` replaces both defaults of the file."""
        default = {"budget": None, "trajectory": None}
        is_replaced = any(kwargs.get(name) is not None for name in default)
        return super().from_dict({**config_dict, **default} if is_replaced else config_dict, **kwargs)

    @property
    def settings(self) -> ModelConfig:
        """`model` as a ModelConfig."""
        return from_mapping(ModelConfig, self.model, "model")

    # Names under which Transformers' tools read sizes. They follow from `model`, so they are not stored.
    num_hidden_layers = property(lambda self: self.settings.blocks * self.settings.loops)  # layers of a cache
    hidden_size = property(lambda self: self.settings.width)
    intermediate_size = property(lambda self: self.settings.ffn)
    num_attention_heads = property(lambda self: self.settings.heads)
    num_key_value_heads = property(lambda self: self.settings.heads)
    head_dim = property(lambda self: self.settings.head_width)
    max_position_embeddings = property(lambda self: self.settings.context)
    vocab_size = property(lambda self: self.settings.vocab)  # the embedding may have more rows, as padding
