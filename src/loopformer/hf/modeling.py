"""Our model as a Transformers model: the wrapper holds a LoopedLM and calls it.

    model = AutoModelForCausalLM.from_pretrained("exported", budget=4)      # after `import loopformer.hf`
    model.generate(**inputs, max_new_tokens=32, budget=2)                   # or trajectory="4-2-1-1"
    LoopFormerForCausalLM.wrap(lm.model, budget=1)                          # around a model in hand, no copy

Caches are Transformers' own, layer loop·k + block; a cache follows the trajectory of its first tokens.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from loopformer.errors import LoopformerError, require
from loopformer.hf.cache import bind, positions_of, slots, visible
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.model.block import Stack
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

logger = logging.get_logger(__name__)


class Pass(GradientCheckpointingLayer):  # type: ignore[misc]
    """One pass through a stack: what Transformers recomputes in the backward pass, where it is asked to."""

    def forward(self, *inputs: Any, stack: Stack, states: bool, maps: bool) -> tuple[Tensor, ...]:
        """The state after the pass, then those after each block and their attention maps, where they are wanted."""
        # Lists of this pass alone: filled again where the pass is recomputed, they are not what was given out.
        kept_states: list[Tensor] | None = [] if states else None
        kept_maps: list[Tensor] | None = [] if maps else None
        x: Tensor = stack(*inputs, states=kept_states, maps=kept_maps)
        return x, *(kept_states or ()), *(kept_maps or ())


class LoopFormerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A LoopedLM with the interface of Transformers."""

    config_class = LoopFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ("LoopedLM",)
    _supports_sdpa = True

    def __init__(self, config: LoopFormerConfig, model: LoopedLM | None = None) -> None:
        super().__init__(config)
        self.model = LoopedLM(config.settings) if model is None else model
        self.run_pass = Pass()
        self._loaded = self.model.tokens.weight.is_meta  # from_pretrained begins with tensors that hold nothing
        self.resolve()  # a budget that the model cannot follow is refused here, not at the first token
        self.post_init()

    @classmethod
    def wrap(cls, model: LoopedLM, **options: Any) -> "LoopFormerForCausalLM":
        """Around a model in hand, which stays the same object; options are those of LoopFormerConfig."""
        config = LoopFormerConfig(model=model.config, dtype=model.tokens.weight.dtype, **options)
        wrapped: LoopFormerForCausalLM = cls(config, model).train(model.training)
        return wrapped

    def resolve(self, budget: int | None = None, trajectory: str | Trajectory | None = None) -> Trajectory:
        """What is asked for, else what the config says, else the full trajectory."""
        if budget is None and trajectory is None:
            budget, trajectory = self.config.budget, self.config.trajectory
        require(budget is None or trajectory is None, "Give a budget or a trajectory, not both.")
        return self.model.resolve(budget if trajectory is None else trajectory)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        budget: int | None = None,
        trajectory: str | Trajectory | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **loss_options: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run input_ids [B, T] or inputs_embeds [B, T, D] along one trajectory, on top of a cache if there is one.

        logits         [B, T or logits_to_keep, vocab]
        hidden_states  when asked for: the state [B, T, D] before the first pass and after each block of each pass,
                       not normed; hidden_states[::k] are those before the first pass and after each
        attentions     when asked for, with attn_implementation="eager": maps [B, H, T, keys] of each block and pass
        loss           with labels [B, T]: the mean cross-entropy of the next token; -100 does not count
        """
        config, vocab = self.config, self.model.config.vocab
        maps: list[Tensor] | None = [] if _either(output_attentions, config.output_attentions) else None
        if maps is not None and config._attn_implementation != "eager":
            logger.warning_once('Attention maps are only computed with attn_implementation="eager".')
            maps = None
        require((input_ids is None) != (inputs_embeds is None), "Give input_ids or inputs_embeds, one of them.")
        if input_ids is not None:
            self.model.check(input_ids, values=past_key_values is None or input_ids.shape[-1] > 1)
        x = self.model.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and _either(use_cache, config.use_cache and not self.training):
            past_key_values = DynamicCache(config=config)
        passes = bind(past_key_values, self.model, self.resolve(budget, trajectory), len(x))
        if position_ids is None:
            position_ids = positions_of(attention_mask, past_key_values, x.shape[1], x.device)
        self._check_context(position_ids)
        mask = visible(attention_mask, past_key_values, x.shape[1], x.device)

        x, rotary = self.model.add_positions(x, position_ids)
        states = [x] if _either(output_hidden_states, config.output_hidden_states) else None
        start = self.model.random_initial_state(position_ids, input_ids)
        step = partial(self._step, past_key_values, states, maps)
        x = self.model.run_loops(step, x, passes, rotary, mask, None, start)
        hidden = self.model.final_norm(x)
        wanted = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden[:, wanted])[..., :vocab]

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab, **loss_options)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=None if states is None else tuple(states),
            attentions=None if maps is None else tuple(maps),
        )
        return output if _either(return_dict, config.return_dict) else output.to_tuple()

    def create_masks_for_generate(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Any, **_: Any
    ) -> Tensor | None:
        """What `generate` asks for with a static cache: the mask of the next call, of one shape all along."""
        return visible(attention_mask, past_key_values, inputs_embeds.shape[1], inputs_embeds.device)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Tensors that the files lack start as in a new model; a new model has drawn its own already."""
        if self._loaded:
            named = self.model.named_parameters()
            lacking = [(name, tensor) for name, tensor in named if not getattr(tensor, "_is_hf_initialized", False)]
            drawn = LoopedLM(self.model.config).state_dict() if lacking else {}
            for name, tensor in lacking:
                tensor.copy_(drawn[name])

    def get_input_embeddings(self) -> nn.Module:
        return self.model.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.tokens = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Module:
        """Nothing, or a refusal: the vocabulary is one of the model's settings."""
        known = self.model.config.vocab
        require(
            (new_num_tokens or 0) <= known,
            f"The model knows {known} tokens and cannot be given {new_num_tokens}; train one that does.",
        )
        return self.get_input_embeddings()

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def _step(
        self, cache: Any, states: list[Tensor] | None, maps: list[Tensor] | None, number: int, *inputs: Any
    ) -> Tensor:
        """How the loop runs a pass; what is wanted of its blocks goes to the lists."""
        stack = self.model.stack
        blocks = len(stack.blocks)
        wanted = {"stack": stack, "states": states is not None, "maps": maps is not None}
        if cache is None:
            results: tuple[Tensor, ...] = self.run_pass(*inputs, **wanted)
        else:
            results = self._cached_pass(*inputs, slots(cache, number, blocks), **wanted)
        x, *kept = results
        if states is not None:
            states += kept[:blocks]
        if maps is not None:
            maps += kept[-blocks:]
        return x

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _cached_pass(self, *inputs: Any, **wanted: Any) -> tuple[Tensor, ...]:
        """Not compiled: the cache's layers are others in each pass, so each pass would be a graph of its own.

        Nor recomputed, as that would store the same keys again.
        """
        return self.run_pass.forward(*inputs, **wanted)

    def _check_context(self, positions: Tensor) -> None:
        """Positions [B or 1, T] must lie in the context: nothing slides."""
        last, context = int(positions.max()), self.model.config.context
        if last >= context:
            raise LoopformerError(
                f"The sequence has {last + 1} tokens but the context is {context}; shorten it or ask for fewer."
            )


def _either(choice: bool | None, default: bool) -> bool:
    return default if choice is None else choice
