"""LoopFormerForCausalLM: a LoopedLM behind the interface of a Transformers model.

    model = AutoModelForCausalLM.from_pretrained("exported", budget=4)      # after `import loopformer.hf`
    model.generate(**inputs, max_new_tokens=32, budget=2)                   # or trajectory="2-1-2-3"
    LoopFormerForCausalLM.wrap(lm.model, budget=1)                          # shares the weights of a loaded model

The caches are those of Transformers. Layer loop·k + block of a cache holds the keys and values of that loop and
block. A cache can only be used with the model and trajectory that filled it.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from loopformer.errors import LoopformerError, require
from loopformer.hf.configuration import LoopFormerConfig
from loopformer.model.block import Stack
from loopformer.model.cache import LoopPlan
from loopformer.model.looped import LoopedLM
from loopformer.trajectory import Trajectory

logger = logging.get_logger(__name__)
_BINDING = "loopformer_binding"  # attribute of a filled cache and its copies: model, trajectory, LoopPlan


@dataclass(frozen=True)
class CacheLayer:
    """The `KVStore` of one (loop, block), backed by one layer of a Transformers cache."""

    cache: Any
    layer: int

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, T, D/H]; return those of all positions so far."""
        keys, values = self.cache.update(k, v, self.layer)
        return keys, values


class CheckpointedLoop(GradientCheckpointingLayer):  # type: ignore[misc]
    """One loop through the stack: the unit that gradient checkpointing recomputes in the backward pass."""

    def forward(self, *inputs: Any, stack: Stack, states: bool, maps: bool) -> tuple[Tensor, ...]:
        """The state after the loop. If requested, the states after its blocks and their attention maps follow."""
        # New lists for each call: recomputing a loop must not append to lists that the caller already has.
        block_states: list[Tensor] | None = [] if states else None
        block_maps: list[Tensor] | None = [] if maps else None
        x: Tensor = stack(*inputs, states=block_states, maps=block_maps)
        return x, *(block_states or ()), *(block_maps or ())


# A loop that reads and writes a cache. It calls `forward` directly, which bypasses gradient checkpointing, because
# recomputing it would store the same keys twice. It is not compiled, because each loop writes to other cache layers
# and would need a graph of its own.
_run_cached_loop = torch.compiler.disable(CheckpointedLoop.forward)  # type: ignore[no-untyped-call]


class LoopFormerForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A LoopedLM with the interface of Transformers."""

    config_class = LoopFormerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ("LoopedLM",)
    _input_embed_layer = "tokens"
    _supports_sdpa = True

    def __init__(self, config: LoopFormerConfig, model: LoopedLM | None = None) -> None:
        super().__init__(config)
        self.model = LoopedLM(config.settings) if model is None else model
        self.run_loop = CheckpointedLoop()
        self._is_loaded = self.model.tokens.weight.is_meta  # as from_pretrained builds it
        self.resolve()  # refuse a default budget that the model cannot follow
        self.post_init()

    @classmethod
    def wrap(cls, model: LoopedLM, **options: Any) -> "LoopFormerForCausalLM":
        """Wrap a loaded model, which is not copied. The options are those of LoopFormerConfig."""
        config = LoopFormerConfig(model=model.config, dtype=model.tokens.weight.dtype, **options)
        wrapped: LoopFormerForCausalLM = cls(config, model).train(model.training)
        return wrapped

    def resolve(self, budget: int | None = None, trajectory: str | Trajectory | None = None) -> Trajectory:
        """The trajectory of a call: its arguments, else the default in the config, else all L loops."""
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
        hidden_states  if requested: the state [B, T, D] before the first loop and after each block of each loop,
                       without the final norm; hidden_states[::k] leaves out those inside a loop
        attentions     if requested, with attn_implementation="eager": maps [B, H, T, keys] of each block and loop
        loss           with labels [B, T]: the mean cross-entropy of the next token; labels of -100 are ignored
        """
        config, vocab = self.config, self.model.config.vocab
        maps: list[Tensor] | None = [] if _argument_or(output_attentions, config.output_attentions) else None
        if maps is not None and config._attn_implementation != "eager":
            logger.warning_once('Attention maps are only computed with attn_implementation="eager".')
            maps = None
        require((input_ids is None) != (inputs_embeds is None), "Give input_ids or inputs_embeds, one of them.")
        if input_ids is not None:
            self.model.check(input_ids, values=past_key_values is None or input_ids.shape[-1] > 1)
        x = self.model.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and _argument_or(use_cache, config.use_cache and not self.training):
            past_key_values = DynamicCache(config=config)
        plan = self._plan_loops(past_key_values, self.resolve(budget, trajectory), len(x))
        positions = self._positions(x, attention_mask, past_key_values)
        position_ids = positions if position_ids is None else position_ids
        length, context = int(position_ids.max()) + 1, self.model.config.context
        require(
            length <= context,
            f"The sequence has {length} tokens but the context is {context}; shorten it or generate fewer.",
        )
        mask = create_causal_mask(config, x, attention_mask, past_key_values)

        x, rotary = self.model.add_positions(x, position_ids)
        states = [x] if _argument_or(output_hidden_states, config.output_hidden_states) else None
        step = partial(self._run_loop, past_key_values, states, maps)
        x = self.model.run_loops(step, x, self.model.initial_state(x, position_ids, input_ids), plan, rotary, mask)
        hidden = self.model.final_norm(x)
        scored = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden[:, scored])[..., :vocab]

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
        return output if _argument_or(return_dict, config.return_dict) else output.to_tuple()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialize the tensors that a loaded folder lacks. A new model has initialized all of them already."""
        if self._is_loaded:
            named = self.model.named_parameters()
            missing = [(name, tensor) for name, tensor in named if not getattr(tensor, "_is_hf_initialized", False)]
            fresh = LoopedLM(self.model.config).state_dict() if missing else {}
            for name, tensor in missing:
                tensor.copy_(fresh[name])

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Module:
        """Return the embeddings unchanged. Raises for a larger vocabulary, which is a setting of the model."""
        vocab = self.model.config.vocab
        require(
            (new_num_tokens or 0) <= vocab,
            f"The model has {vocab} tokens and cannot be resized to {new_num_tokens}; train a model with more.",
        )
        return self.model.tokens

    def _plan_loops(self, cache: Any, trajectory: Trajectory, rows: int) -> LoopPlan:
        """The loops of a trajectory. An empty cache is bound to them; a cache bound to others is refused.

        The plan, with its modulations, is computed once per sequence and stored with the binding. With gradients it
        is computed at each call, because its graph is freed by the backward pass.
        """
        plan: LoopPlan | None = None
        if cache is not None and cache.get_seq_length() > 0:
            model, bound, plan = getattr(cache, _BINDING, (lambda: None, None, None))
            require(model() is self.model, "This cache was filled by another model; make a new cache.")
            if bound != trajectory:
                raise LoopformerError(
                    f"This cache follows {bound}, not {trajectory}, and keys of one trajectory mean nothing under "
                    "another; make a new cache."
                )
        with_gradients = torch.is_grad_enabled()
        if plan is None or with_gradients:
            plan = self.model.plan_loops(trajectory, rows)
        if cache is not None:
            setattr(cache, _BINDING, (ref(self.model), trajectory, None if with_gradients else plan))
        return replace(plan, rows=[rows] * trajectory.budget)  # beam search changes the rows of a filled cache

    def _positions(self, x: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:
        """The positions [B or 1, T] of new tokens. Padding takes no position."""
        length = x.shape[1]
        past = 0 if cache is None else cache.get_seq_length()  # a tensor on the device for static caches
        if attention_mask is None or attention_mask.ndim != 2:
            return (past + torch.arange(length, device=x.device))[None]
        if isinstance(past, int) and attention_mask.shape[1] != past + length:
            raise LoopformerError(
                f"attention_mask has shape {list(attention_mask.shape)}; it must cover the {past} tokens in the "
                f"cache and the {length} new ones."
            )
        positions = attention_mask.to(x.device).long().cumsum(-1) - 1
        return positions.clamp(min=0)[:, -length:]

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def _run_loop(
        self, cache: Any, states: list[Tensor] | None, maps: list[Tensor] | None, loop: int, *inputs: Any
    ) -> Tensor:
        """Run one loop. Append the states and attention maps of its blocks to `states` and `maps`, if given."""
        stack, blocks = self.model.stack, len(self.model.stack.blocks)
        options = {"stack": stack, "states": states is not None, "maps": maps is not None}
        x: Tensor
        if cache is None:
            x, *outputs = self.run_loop(*inputs, **options)
        else:
            layers = [CacheLayer(cache, loop * blocks + block) for block in range(blocks)]
            x, *outputs = _run_cached_loop(self.run_loop, *inputs, layers, **options)
        if states is not None:
            states += outputs[:blocks]
        if maps is not None:
            maps += outputs[-blocks:]
        return x


def _argument_or(argument: bool | None, default: bool) -> bool:
    return default if argument is None else argument
