"""Sampling by the sharded model: greedy is transformers' own, log-probabilities are the policy's, draws are fair."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from odc_triton import fully_shard
from odc_triton.hf import enable_packing
from odc_triton.jobs.rl import transformers_engine
from odc_triton.jobs.rl.generation import Request, SamplingOptions
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from tests.support import ranks
from tests.support.sampling import log_probabilities
from tests.support.sft_case import QWEN2

END = 16  # which the model says within 20 tokens in some completions, and not in others
PROMPTS = ([5, 6, 7, 8, 9, 10], [11], [12, 13, 14])


def _model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    config = {name: value for name, value in QWEN2.items() if name != "model_type"}
    model = Qwen2ForCausalLM(Qwen2Config(**config, eos_token_id=END)).eval()
    # What a model's own config asks for must not change the policy that is sampled.
    model.generation_config.update(repetition_penalty=1.7, top_k=1, temperature=0.1, do_sample=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # so that draws differ in probability
    return model


def _sample(rank: int, world: int, temperature: float, seeds: list[int], most: int) -> list:
    """Each rank decodes another number of prompts: none waits for another."""
    model = _model()
    enable_packing(model)
    model = fully_shard(model.train())
    options = SamplingOptions(temperature=temperature, max_new_tokens=most, end_tokens=(END,))
    engine = TransformersEngine(model)
    requests = [Request(ids=ids, seeds=seeds) for ids in PROMPTS[rank:]]
    made = [engine.generate(requests, options) for _ in range(1 + rank)][-1]
    assert model.training
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_the_policys(temperature: float) -> None:
    model = _model()
    one, two = ranks.run(_sample, 2, temperature, [7, 8], 20)
    tokens = [[[sampled.ids for sampled in group] for group in made] for made in (one[1:], two)]
    assert tokens[0] == tokens[1], "a completion depends on its seed, not on what is decoded beside it"
    assert {sampled.ended for group in one for sampled in group} == {True, False}
    for prompt, group in zip(PROMPTS, one, strict=True):
        assert (group[0].ids == group[1].ids) == (temperature == 0.0)
        for sampled in group:
            assert sampled.ended == (sampled.ids[-1] == END)
            assert END not in sampled.ids[:-1]
            assert sampled.ended or len(sampled.ids) == 20
            want = log_probabilities(model, prompt, sampled.ids, temperature or 1.0)
            torch.testing.assert_close(torch.tensor(sampled.logps), want, rtol=1e-4, atol=1e-4)
        if temperature == 0.0:
            with torch.no_grad():
                plain = model.generate(
                    torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.0, pad_token_id=END
                )
            assert plain[0, len(prompt) :].tolist() == group[0].ids


def test_draws_have_the_models_probabilities() -> None:
    """2,000 first tokens against the softmax: a chi-squared test, whose 1-in-1,000 bound a fixed seed can't fail."""
    model, seeds = _model(), list(range(2000))
    ((group, *_),) = ranks.run(_sample, 1, 1.0, seeds, 1)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    found = Counter(sampled.ids[0] for sampled in group)
    expected = {token: len(seeds) * p for token, p in enumerate(probabilities.tolist()) if p * len(seeds) >= 5}
    assert len(expected) > 10
    statistic = sum((found[token] - count) ** 2 / count for token, count in expected.items())
    bound = len(expected) + 4.5 * (2 * len(expected)) ** 0.5
    assert statistic < bound


def test_decoding_ends_when_asked(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "_POLL_S", 0.0)
        engine = TransformersEngine(_model(), should_stop=lambda: True)
        ((sampled,),) = engine.generate(
            [Request(ids=[5], seeds=[1])], SamplingOptions(temperature=1.0, max_new_tokens=50, end_tokens=())
        )
    assert (len(sampled.ids), sampled.ended) == (1, False)
