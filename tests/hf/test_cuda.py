"""On a GPU: the wrapper still is our model, also where `generate` compiles around a static cache."""

import pytest
import torch

from loopformer import LoopedLM
from loopformer.hf import LoopFormerForCausalLM

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_caches_agree_with_our_own_logits(model: LoopedLM) -> None:
    theirs = LoopFormerForCausalLM.wrap(model.cuda())
    ids = torch.randint(1, 96, (2, 6), device="cuda")
    for options in ({"budget": 2}, {"trajectory": "2-1-1"}):
        plain = theirs.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False, **options)
        for cache in ("dynamic", "static"):
            found = theirs.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation=cache, **options)
            assert torch.equal(found, plain)
        trajectory = options.get("budget", options.get("trajectory"))
        with torch.no_grad():
            torch.testing.assert_close(
                theirs(plain, **options).logits, model(plain, trajectory).logits, atol=1e-4, rtol=1e-4
            )


def test_bf16_generates(model: LoopedLM) -> None:
    theirs = LoopFormerForCausalLM.wrap(model.cuda().bfloat16())
    ids = torch.randint(1, 96, (2, 6), device="cuda")
    assert theirs.generate(ids, max_new_tokens=8, budget=3).shape == (2, 14)
