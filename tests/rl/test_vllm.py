"""What vLLM's server is asked for, and what can go wrong with it that vLLM itself does not show (tests/vllm)."""

from __future__ import annotations

import copy
import io
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from odc_triton import full_parameters, fully_shard, minibatch
from odc_triton.base.errors import GenerationAborted, GenerationFailed
from odc_triton.checkpoint.pretrained_tensors import PretrainedTensors
from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.vllm_sampling import sampled
from odc_triton.jobs.rl.vllm_server import VllmServer
from odc_triton.jobs.vllm.adapter import adapter_folder
from odc_triton.jobs.vllm.policy_server import PolicyServer, is_too_old
from tests.support import ranks
from tests.support.deadlines import LONG_S
from tests.support.families import with_lora
from tests.support.models import CASES, build, microbatches
from tests.support.vllm_stand_in import Serving, completion, vllm_serve

OPTIONS = SamplingOptions(temperature=0.7, max_new_tokens=6, end_tokens=(2, 5, 11))
REQUESTS = [Request(ids=[3, 9, 14], seeds=[2**63 - 1, 7, 8]), Request(ids=[30], seeds=[]), Request(ids=[4], seeds=[7])]
# What could cut the distribution is off, whatever the model's own generation config says.
ASKED = {
    "n": 1,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": 6,
    "stop_token_ids": [2, 5, 11],
    "ignore_eos": True,
    "logprobs": 0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with vllm_serve() as serving:
        yield serving


@pytest.fixture
def with_faults(server: Serving) -> Iterator[Callable[..., str]]:
    """Sets what the server does wrong, for one test, and returns its address."""

    def set_faults(**faults: object) -> str:
        server.faults = faults
        return server.address

    yield set_faults
    server.faults = {}


def assert_as_asked(requests: list[Request], made: list[list[Sampled]]) -> None:
    ids = [[one.ids for one in each] for each in made]
    assert ids == [[completion(request.ids, seed, 2) for seed in request.seeds] for request in requests]
    for one in (one for each in made for one in each):
        first, unknown, last = one.logps
        assert (first, last, one.ended) == (-0.5, -1.5, True)
        assert unknown != unknown


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, torch.Tensor]:
    """The weights after it."""
    with minibatch(model, tokens=1):
        CASES["qwen2"].loss(model, microbatches("qwen2", [9], seed=step)[0]).backward()
    optimizer.step()
    return dict(full_parameters(model))


def assert_are(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert found.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in found.items())


def _rolls_out(rank: int, world: int, address: str) -> list[dict[str, torch.Tensor]]:
    model = fully_shard(build("qwen2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, weights = VllmServer(address), []
    for step in range(2):
        weights.append(_step(model, optimizer, step))
        engine.sync(model)
        assert_as_asked(REQUESTS[rank:], engine.generate(REQUESTS[rank:], OPTIONS))
    engine.close()
    return weights


def test_weights_and_requests_of_ranks() -> None:
    with vllm_serve() as serving:
        weights, _ = ranks.run(_rolls_out, 2, serving.address)
        for found, wanted in zip(serving.weights, weights, strict=True):
            assert_are(found, wanted)
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    control = [path for path, _ in serving.asked if not path.startswith("/v1/")]
    assert control == ["/init_weight_transfer_engine", *update, *update]
    versions = [content.get("weight_version") for path, content in serving.asked if path == "/finish_weight_update"]
    assert versions == ["2", "3"]
    completions = [content for path, content in serving.asked if path == "/v1/completions"]
    assert {each.pop("seed") for each in completions} == {2**63 - 1, 7, 8}
    prompts = [each.pop("prompt") for each in completions]
    assert sorted(prompts) == [[3, 9, 14]] * 6 + [[4]] * 4
    assert completions == [{"model": "the-policy", "return_token_ids": True, **ASKED}] * 10


UP_PROJ = "model.layers.1.mlp.up_proj.base_layer.weight"
# What the server has and does, what is changed of the model or LoraConfig's options, and why it gets the merged model;
# None: it gets the adapter.
ADAPTED = [
    ({}, None, None),
    ({"lora": None}, None, "was started without --enable-lora"),
    ({"refuse": "/v1/load_lora_adapter"}, None, "refused POST /v1/load_lora_adapter with status 500"),
    ({}, "model.norm.weight", r"norm\.weight is not one of LoRA's two factors"),
    ({}, UP_PROJ, r"up_proj\.weight is not as in "),
    ({}, {"alpha_pattern": {"q_proj": 64}}, "the adapter's alpha_pattern"),
    ({}, {"rank_pattern": {"q_proj": 1}}, "the adapter's rank_pattern"),
    ({}, {"init_lora_weights": "olora"}, "the adapter's init_lora_weights 'olora'"),
]


def _adapts(rank: int, world: int, folder: str, addresses: list[str]) -> list[tuple]:
    """What is printed, the policy's tensors, merged and alone, and the names that completions ask for."""
    found = []
    for address, (_, changed, _) in zip(addresses, ADAPTED, strict=True):
        options = changed if isinstance(changed, dict) else {}
        model = with_lora(type(build("qwen2")).from_pretrained(folder), **options)
        if isinstance(changed, str):
            value = model.get_parameter(f"base_model.model.{changed}")
            value.requires_grad_("norm" in changed).data[-1:] += 0.5
        model, names, engine = fully_shard(model), [], VllmServer(address)
        with redirect_stdout(io.StringIO()) as printed:
            for _ in range(2):
                engine.sync(model)
                names.append(engine._name())
        factors = {name.replace(".default", ""): each for name, each in full_parameters(model) if "lora_" in name}
        found.append((printed.getvalue(), factors if engine.server.adapter else dict(PretrainedTensors(model)), names))
        engine.close()
    return found


def test_adapters_go_alone_where_they_can(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    with ExitStack() as servers:
        serving = [servers.enter_context(vllm_serve()) for _ in ADAPTED]
        for each, (how, _, _) in zip(serving, ADAPTED, strict=True):
            each.faults = {"lora": {"max_lora_rank": 8}, "model": {"model": str(tmp_path)}} | how
        both = ranks.run(_adapts, 2, str(tmp_path), [each.address for each in serving])
    assert not [*Path("/dev/shm").glob("odc-adapter-*")]
    for each, (printed, tensors, names), (quiet, _, others), (_, _, why) in zip(serving, *both, ADAPTED, strict=True):
        assert quiet == ""
        assert names == others
        for found in each.weights:
            assert_are(found, tensors)
        assert re.fullmatch(f"vLLM gets the merged model at each update.*: .*{why}.*\n" if why else "", printed)
        asked = [content["lora_name"] for path, content in each.asked if "lora" in path]
        assert asked == ([] if why else [*names, *names, names[1]])  # each is taken back, the last by both ranks
        assert (names[0] == names[1]) is (why is not None)


def _writes_adapter(folder: Any) -> None:
    with adapter_folder(fully_shard(with_lora(build("qwen2")))) as path:
        folder.send(path)
        time.sleep(LONG_S)


def test_the_next_job_removes_a_killed_ones_adapter() -> None:
    folders, context = [], ranks.fork_server()
    for _ in range(3):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_writes_adapter, args=(theirs,))
        process.start()
        folders.append(Path(ours.recv()))
        assert [each.exists() for each in folders] == [each is folders[-1] for each in folders]
        process.kill()
        process.join()
    shutil.rmtree(folders[-1])


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"choices": 0}, "returned 0 completions instead of 1"),
        ({"body": "<html>busy</html>"}, "did not answer POST /v1/completions with JSON: '<html>busy</html>'"),
        ({"choice": {"token_ids": None}}, "an answer that is not vLLM's"),
        ({"choice": {"finish_reason": "abort"}}, "ended by 'abort'"),
        ({"missing_bytes": 5}, "is unreachable for POST /v1/completions"),
        ({"slow_s": 2 * LONG_S}, "did not answer POST /v1/completions within 0.3 s"),
        ({"drips": "headers", "missing_bytes": 10**6}, "did not answer POST /v1/completions within 0.3 s"),
        ({"drips": "body", "missing_bytes": 10**6}, "did not answer POST /v1/completions within 0.3 s"),
        ({"slow_s": 2 * LONG_S, "fast_seed": 8, "choices": 2}, "returned 2 completions"),  # not waiting for others
    ],
)
def test_faults_of_completions(with_faults: Callable[..., str], faults: dict, words: str) -> None:
    timeout_s = 0.3 if "0.3 s" in words else LONG_S
    engine = VllmServer(with_faults(**faults), timeout_s=timeout_s)
    begin_s = time.monotonic()
    with pytest.raises(GenerationFailed, match=words):
        engine.generate(REQUESTS, OPTIONS)
    assert time.monotonic() - begin_s < LONG_S


@pytest.mark.parametrize(
    ("ids", "logps", "reason", "words"),
    [
        ([], [], "length", "0 tokens of at most 6"),
        ([3] * 7, [-1.0] * 7, "length", "7 tokens of at most 6"),
        ([3], [-1.0] * 9, "length", "1 tokens of at most 6, with 9 log-probabilities"),
        ([5, 3], [-1, -1], "length", r"ended by 'length' at \[3\], where only \[2, 5, 11\] end"),
        ([3], [-1], "stop", r"ended by 'stop' at \[3\], where only \[2, 5, 11\] end"),
    ],
)
def test_what_vllm_can_not_have_sampled(ids: list, logps: list, reason: str, words: str) -> None:
    with pytest.raises(GenerationFailed, match=f"vLLM returned .*{words}"):
        sampled(ids, logps, reason, OPTIONS)


def test_requests_that_another_thread_aborts() -> None:
    """Their error is not that of a server that is gone."""
    found: list[Exception] = []
    before = {*threading.enumerate()}

    def ask() -> None:
        try:
            engine.generate(REQUESTS, OPTIONS)
        except Exception as error:
            found.append(error)

    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        engine = VllmServer(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        with server.accept()[0] as connection:
            connection.recv(1)
            engine.abort()
            thread.join(LONG_S)
    assert [*map(type, found)] == [GenerationAborted]
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer) and each not in before]
    assert all(each.finished.is_set() for each in timers), "a script would wait for them at its end"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"version": "0.28.0"}, r"is vLLM 0\.28\.0: install 0\.32 or newer"),
        (
            {"transfer": None},
            r"can't read the policy from memory \(weight_transfer_config is None\): start it with VLLM_S",
        ),
        ({"refuse": "/server_info?config_format=json"}, "refused GET /server_info.* start it with VLLM_SERVER"),
        (
            {"model": {"logprobs_mode": "raw_logprobs"}},
            "returns raw_logprobs, not those after the temperature: start it",
        ),
        ({"model": {"logprobs_mode": None}}, "returns None, not those after the temperature"),
        (
            {"model": {"dtype": "torch.bfloat16"}},
            "computes in bfloat16, and the policy in float32: start it with --dtype",
        ),
        ({"model": {"max_model_len": 64}}, "takes 64 tokens, .* may have 100: start it with --max-model-len 100"),
        ({"model": {"model": "other"}}, "has vocab_size 77, and the policy 97: start it with the policy's model"),
    ],
)
def test_check_refuses(with_faults: Callable[..., str], tmp_path: Path, faults: dict, words: str) -> None:
    config = build("qwen2").config
    if faults == {"model": {"model": "other"}}:
        other = copy.deepcopy(config)
        other.vocab_size = 77
        other.save_pretrained(tmp_path)
        faults = {"model": {"model": str(tmp_path)}}
    with pytest.raises(GenerationFailed, match=words):
        PolicyServer(with_faults(**faults)).check(config=config, dtype="float32", tokens=100)


# What the server does wrong with weights, and what is said.
LOST = [
    ({"refuse": "/init_weight_transfer_engine"}, "refused POST /init_weight_transfer_engine with status 500: "),
    ({"refuse": "/update_weights"}, """refused POST /update_weights with status 500: '{"error": "the weights do"""),
    ({"keeps": True}, "keeps its prefix cache, as others use it"),
    ({"slow_update_s": 2 * LONG_S}, "did not answer POST /update_weights within 1 s"),
]


def _does_not_send(rank: int, world: int, addresses: list[str]) -> list[str]:
    model, found = fully_shard(build("qwen2")), []
    for address in addresses:
        engine = VllmServer(address, timeout_s=1.0 if address == addresses[-1] else LONG_S)
        begin_s = time.monotonic()
        with pytest.raises(GenerationFailed) as raised:
            engine.sync(model)
        assert time.monotonic() - begin_s < LONG_S
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_weights_that_do_not_arrive() -> None:
    with ExitStack() as servers:
        serving = [servers.enter_context(vllm_serve()) for _ in LOST]
        for each, (faults, _) in zip(serving, LOST, strict=True):
            each.faults = faults
        both = ranks.run(_does_not_send, 2, [each.address for each in serving])
    for first, second, (_, words) in zip(*both, LOST, strict=True):
        assert first.startswith(("Refused: ", "GenerationFailed: "))
        assert words in first
        assert second.startswith("WeightsNotRead: the vLLM server did not read the policy (rank 0: ")
        assert words in second


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "http://", "http://here:99999", "http://here:x", "http://[::1"])
def test_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"write it as http://127\.0\.0\.1:8000"):
        VllmServer(address)


@pytest.mark.parametrize(("version", "expected"), [("0.31.9", True), ("0.32.0.dev3+g1a2b", False), ("dev", False)])
def test_versions(version: str, expected: bool) -> None:
    """ "dev": of a source tree without tags, whose version nobody knows."""
    assert is_too_old(version) == expected
