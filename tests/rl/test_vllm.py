"""vLLM's server and vLLM in the rank's process, against a stand-in of its interface (it can't run here)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from odc_triton.rl.generation import GenerationFailed, Request, Sampled, SamplingOptions
from odc_triton.rl.vllm_sampling import sampled
from odc_triton.rl.vllm_server import VllmServer
from tests.support import ranks
from tests.support.models import CASES, build, microbatches
from tests.support.vllm_stand_in import FOLDER, Serving, stand_in, vllm_serve

OPTIONS = SamplingOptions(temperature=0.7, max_new_tokens=6, end_tokens=(2, 5, 11))
REQUESTS = [Request(ids=[3, 9, 14], seeds=[2**63 - 1, 7, 8]), Request(ids=[30], seeds=[]), Request(ids=[4], seeds=[7])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the policy that the servers start from, by its config alone."""
    path = tmp_path_factory.mktemp("policy")
    build("qwen2").config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with vllm_serve(folder) as serving:
        yield serving


@pytest.fixture
def with_faults(server: Serving) -> Iterator[Callable[..., str]]:
    """Sets what the server does wrong, for one test, and returns its address."""

    def set_faults(**faults: object) -> str:
        server.faults = faults
        return server.address

    yield set_faults
    server.faults = {}


def assert_policys(model: torch.nn.Module, requests: list[Request], made: list[list[Sampled]]) -> None:
    """Each completion has the log-probabilities of the policy as it is, and ends as it was asked to."""
    assert [len(each) for each in made] == [len(each.seeds) for each in requests]
    for request, completions in zip(requests, made, strict=True):
        for one in completions:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([request.ids + one.ids]), use_cache=False).logits[0]
            want = (logits[len(request.ids) - 1 : -1].float() / OPTIONS.temperature).log_softmax(-1)
            want = want[torch.arange(len(one.ids)), torch.tensor(one.ids)]
            # The same fp32 sums over sequences of other lengths.
            torch.testing.assert_close(torch.tensor(one.logps), want, rtol=1e-4, atol=1e-5)
            assert one.ended == (one.ids[-1] in OPTIONS.end_tokens)
            assert one.ended or len(one.ids) == OPTIONS.max_new_tokens


def _rolls_out(rank: int, world: int, address: str) -> list:
    sys.path.insert(0, FOLDER)
    from odc_triton import fully_shard, minibatch

    model = fully_shard(build("qwen2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = VllmServer(address, rank=rank)
    rollouts = []
    for step in range(2):
        with minibatch(model, tokens=1):
            CASES["qwen2"].loss(model, microbatches("qwen2", [9], seed=step)[0]).backward()
        optimizer.step()
        engine.sync(model)
        made = engine.generate(REQUESTS[rank:], OPTIONS)
        assert_policys(model, REQUESTS[rank:], made)
        rollouts.append([[one.ids for one in each] for each in made])
    engine.close()
    return rollouts


def test_ranks_sample_from_the_servers_copy_of_their_policy(folder: Path) -> None:
    with vllm_serve(folder) as serving:
        first, second = ranks.run(_rolls_out, 2, serving.address)
    for mine, theirs in zip(first, second, strict=True):
        assert mine[1:] == theirs  # a seed makes the completion, not who asks
    assert first[0] != first[1]
    names = [name for name, _ in build("qwen2").named_parameters()]
    assert sorted(serving.received) == sorted(names)
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    control = [path for path in serving.asked if not path.startswith("/v1/")]
    assert control == ["/get_world_size", "/init_weight_transfer_engine", *update, *update]
    asked = serving.completions[0]
    # What could cut the distribution is off, whatever the model's own generation config says.
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert asked["stop_token_ids"] == [2, 5, 11]
    assert {each["seed"] for each in serving.completions} == {2**63 - 1, 7, 8}


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"choices": 0}, "returned 0 completions instead of 1"),
        ({"body": "<html>busy</html>"}, "what is not JSON: '<html>busy</html>'"),
        ({"body": "[1]"}, r"what vLLM does not: '\[1\]'"),
        ({"choice": {"token_ids": None}}, "what vLLM does not"),
        ({"choice": {"finish_reason": "abort"}}, "ended by 'abort'"),
        ({"breaks_off": True}, "is not there for POST /v1/completions"),
        ({"missing_bytes": 5}, "is not there for POST /v1/completions"),
        ({"slow_s": 30}, "did not answer POST /v1/completions within 0.3 s"),
        ({"slow_s": 30, "fast_seed": 8, "choices": 2}, "returned 2 completions"),  # the others are not waited for
    ],
)
def test_faults_of_completions(with_faults: Callable[..., str], faults: dict, words: str) -> None:
    timeout_s = 0.3 if faults == {"slow_s": 30} else 60
    engine = VllmServer(with_faults(**faults), rank=0, timeout_s=timeout_s)
    begin_s = time.monotonic()
    with pytest.raises(GenerationFailed, match=words):
        engine.generate(REQUESTS, OPTIONS)
    assert time.monotonic() - begin_s < 20


@pytest.mark.parametrize(
    ("ids", "logps", "reason", "words"),
    [
        ([], [], "length", r"the tokens \[\]"),
        ([3, "x"], [-1.0, -1.0], "length", r"the tokens \[3, 'x'\]"),
        ([3] * 7, [-1.0] * 7, "length", "7 tokens, more than 6"),
        ([3], [-1.0] * 9, "length", "9 log-probabilities of 1 tokens"),
        ([3], [0.5], "length", "one is 0.5"),
        ([5, 3], [-1, -1], "length", "tokens after an end token"),
        ([3], [-1], "stop", r"stopped at token 3, which is not one of \[2, 5, 11\]"),
    ],
)
def test_what_vllm_can_not_have_sampled(ids: list, logps: list, reason: str, words: str) -> None:
    with pytest.raises(GenerationFailed, match=f"vLLM returned .*{words}"):
        sampled(ids, logps, reason, OPTIONS)


def test_an_unknown_log_probability_is_nan() -> None:
    one = sampled([3, 5], [None, -1], "stop", OPTIONS)
    assert one.logps[0] != one.logps[0]
    assert one.logps[1] == -1
    assert one.ended


def test_a_server_that_is_gone(folder: Path) -> None:
    with vllm_serve(folder) as serving:
        engine = VllmServer(serving.address, rank=0)
        engine.check()
        assert len(engine.generate(REQUESTS, OPTIONS)[0]) == 3
        serving.stop()
        with pytest.raises(GenerationFailed, match=f"{serving.address} is not there for POST /v1/completions"):
            engine.generate(REQUESTS, OPTIONS)
        with pytest.raises(GenerationFailed, match="is not there for GET /health"):
            engine.check()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"mode": "raw_logprobs"}, "returns raw_logprobs, not those after the temperature: start it with VLLM_SERVER"),
        ({"refuse": "/server_info?config_format=json"}, "refused GET /server_info.* start it with VLLM_SERVER"),
        ({"transfer": None}, "takes no weights over NCCL"),
        ({"transfer": {"backend": "ipc"}}, "takes no weights over NCCL"),
    ],
)
def test_check_refuses(with_faults: Callable[..., str], faults: dict, words: str) -> None:
    with pytest.raises(GenerationFailed, match=words):
        VllmServer(with_faults(**faults), rank=0).check()


def test_check_warns_of_what_the_server_does_not_say(with_faults: Callable[..., str]) -> None:
    with pytest.warns(UserWarning, match="does not say which log-probabilities"):
        VllmServer(with_faults(mode=None), rank=0).check()


def _does_not_send(rank: int, world: int, address: str, timeout_s: float) -> str:
    sys.path.insert(0, FOLDER)
    from odc_triton import fully_shard

    engine = VllmServer(address, rank=rank, sync_timeout_s=timeout_s)
    begin_s = time.monotonic()
    with pytest.raises(GenerationFailed) as raised:
        engine.sync(fully_shard(build("qwen2")))
    assert time.monotonic() - begin_s < 40
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        # The rank that sends still waits then for a connection that the server does not make.
        ({"refuse": "/init_weight_transfer_engine"}, "refused POST /init_weight_transfer_engine with status 500: "),
        ({"refuse": "/update_weights"}, """refused POST /update_weights with status 500: '{"error": "the weights do"""),
        ({"keeps": True}, "keeps its prefix cache, as others use it"),
        ({"slow_update_s": 60}, "the weights did not reach the server at http://127.0.0.1"),
    ],
)
def test_weights_that_do_not_arrive(folder: Path, faults: dict, words: str) -> None:
    with vllm_serve(folder) as serving:
        serving.faults = faults
        first, second = ranks.run(_does_not_send, 2, serving.address, 1.0 if "slow_update_s" in faults else 60.0)
    assert first.startswith(("Refused: ", "GenerationFailed: "))
    assert words in first
    assert second.startswith("WeightsNotSent: rank 0 did not send the weights for the vLLM server: ")
    assert words in second


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b@127.0.0.1"])
def test_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"write it as http://127\.0\.0\.1:8000"):
        VllmServer(address, rank=0)


def test_colocate(folder: Path) -> None:
    from odc_triton import fully_shard

    model = fully_shard(build("qwen2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in():
        _samples_the_policy(folder, model, optimizer)


def _samples_the_policy(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from odc_triton import minibatch
    from odc_triton.rl.vllm_colocate import VllmColocate

    engine = VllmColocate(folder, rank=3, max_tokens=64)
    wanted = {"seed": 3, "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
    assert engine._llm.options.items() >= wanted.items()
    for step in range(2):
        engine.sync(model)
        assert_policys(model, REQUESTS, engine.generate(REQUESTS, OPTIONS))
        assert engine._llm.resets == step + 1
        with minibatch(model, tokens=1):
            CASES["qwen2"].loss(model, microbatches("qwen2", [9], seed=step)[0]).backward()
        optimizer.step()
    assert engine.generate([], OPTIONS) == []
    engine._llm.reset_prefix_cache = lambda: False
    with pytest.raises(GenerationFailed, match="keeps its prefix cache"):
        engine.sync(model)
    engine._llm.generate = lambda *_, **__: []
    with pytest.raises(GenerationFailed, match="returned 0 completions instead of 4"):
        engine.generate(REQUESTS, OPTIONS)
    engine.close()


def test_vllm_is_named_where_it_is_missing(folder: Path) -> None:
    from odc_triton.rl.vllm_colocate import VllmColocate

    with pytest.raises(GenerationFailed, match=r"vLLM can't be imported here .* install it, 0.28 or newer"):
        VllmColocate(folder, rank=0)
