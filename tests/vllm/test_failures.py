"""What can go wrong with vLLM's server: each job ends in time, with one line of what happened."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.base.errors import GenerationFailed
from odc_triton.jobs.rl.generation import Request, SamplingOptions
from odc_triton.jobs.rl.vllm_server import VllmServer
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.vllm.http import Server
from tests.support import jobs, leftovers, ranks
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.grpo_case import case
from tests.support.jobs import ENDED
from tests.support.vllm_real import RealServer, require_vllm, vllm_serve

require_vllm()
pytestmark = pytest.mark.slow

UPDATE, ROLLOUT = "/update_weights", "/v1/completions"
UNREACHABLE = "is unreachable for POST {}.*see its log, start it again, and resume from the last checkpoint"
SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=8, end_tokens=())


def options(folder: Path, out: Path, server: RealServer, **changes: Any) -> GrpoOptions:
    usual = {"init": None, "model": str(folder / "start"), "engine": "vllm-server", "vllm_server": server.address}
    return case(folder, out=str(out), **usual | changes)


def _struck(rank: int, world: int, wanted: GrpoOptions, of: int, path: str, number: int, group: int | None) -> str:
    """How the job ended on this rank. The number-th request of rank `of` for `path` is its end or, if `group` is
    given, that of these processes, which are the server's.
    """
    post, requests = Server.post, []

    def striking(self: Server, asked: str, *given: Any, **named: Any) -> Any:
        if asked == path:
            requests.append(asked)
        if len(requests) == number and rank == of:
            if group is None:
                os.kill(os.getpid(), signal.SIGKILL)
            requests.append("struck")
            os.killpg(group, signal.SIGSTOP)  # so that it has the request, and does not answer before its end
            threading.Timer(SHORT_S, os.killpg, (group, signal.SIGKILL)).start()
        return post(self, asked, *given, **named)

    Server.post = striking
    (end,) = jobs.train(rank, world, [wanted])
    return end


@pytest.mark.parametrize(("of", "path", "number"), [(0, UPDATE, 2), (1, ROLLOUT, 1)], ids=["update", "rollout"])
def test_the_server_is_killed(folder: Path, tmp_path: Path, of: int, path: str, number: int) -> None:
    with vllm_serve(folder / "start", tmp_path / "log") as server:
        before = leftovers.names()  # vLLM's own stay, as it is killed
        wanted = options(folder, tmp_path / "out", server)
        ends = ranks.run(_struck, 2, wanted, of, path, number, server.process.pid)
        leftovers.assert_none_since(before)
    assert len(jobs.lines(tmp_path / "out")) == number - 1
    words = UNREACHABLE.format(path)
    if path == UPDATE:
        assert_one_line(ends[0], f"GenerationFailed: the server at {server.address} {words}")
        assert_one_line(ends[1], rf"WeightsNotRead: the vLLM server did not read the policy \(rank 0: .*{words}")
    else:
        assert ends[0] == ends[1]
        assert_one_line(ends[0].partition("\n")[0], rf"RolloutFailed: a rollout failed \(.*rank 1: .*{words}")


def assert_one_line(text: str, words: str) -> None:
    assert "\n" not in text, text
    assert re.match(words, text), text


@pytest.mark.parametrize(("of", "path", "number"), [(0, UPDATE, 2), (1, ROLLOUT, 1)], ids=["update", "rollout"])
def test_a_rank_is_killed(folder: Path, tmp_path: Path, server: RealServer, of: int, path: str, number: int) -> None:
    """Also between the server's start of an update and its end; the next job has the server nevertheless."""
    before = leftovers.names()
    with ranks.start(_struck, 2, options(folder, tmp_path / "out", server), of, path, number, None) as job:
        outcomes = job.join()
    assert outcomes[of].signal == signal.SIGKILL
    assert_one_line(outcomes[1 - of].value, f"RankLost: .*rank {of} died")
    assert jobs.run(2, options(folder, tmp_path / "next", server, steps=1)) == [ENDED]
    leftovers.assert_none_since(before)


def _hangs(rank: int, world: int, start: str, address: str, group: int) -> list[str]:
    """What a rollout and an update say while the server stands still."""
    from odc_triton import fully_shard

    model = fully_shard(AutoModelForCausalLM.from_pretrained(start))
    engine, found = VllmServer(address, timeout_s=LONG_S), []
    requests = [Request(ids=[5], seeds=[1, 2])]
    engine.sync(model)
    engine.generate(requests, SAMPLING)
    engine._timeout_s = engine.server._timeout_s = SHORT_S
    model._odc_engine.exchange("both have sampled", {})
    if rank == 0:
        os.killpg(group, signal.SIGSTOP)
    model._odc_engine.exchange("stopped", {})
    for call in (lambda: engine.generate(requests, SAMPLING), lambda: engine.sync(model)):
        with pytest.raises(GenerationFailed) as raised:
            call()
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    engine.close()
    return found


def test_the_server_hangs(folder: Path, tmp_path: Path, server: RealServer) -> None:
    """And goes on: then it serves the next job, though it has begun an update that nobody ended."""
    try:
        found = ranks.run(_hangs, 2, str(folder / "start"), server.address, server.process.pid)
    finally:
        server.signal(signal.SIGCONT)
    late = f"the server at {server.address} did not answer POST {{}} within {SHORT_S:g} s: see its log"
    for of_rollout, _ in found:
        assert_one_line(of_rollout, f"GenerationFailed: {late.format('/v1/completions')}")
    assert_one_line(found[0][1], f"GenerationFailed: {late.format('/start_weight_update')}")
    assert_one_line(found[1][1], "WeightsNotRead: the vLLM server did not read the policy .*/start_weight_update")
    assert jobs.run(2, options(folder, tmp_path / "out", server, steps=1)) == [ENDED]


def _refused(rank: int, world: int, start: str, address: str) -> list[str]:
    """What is said of policies that are not those of the server's model."""
    from odc_triton import fully_shard

    wider = AutoConfig.from_pretrained(start, vocab_size=301)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    models = [AutoModelForCausalLM.from_config(wider), AutoModelForCausalLM.from_pretrained(start)]
    found = []
    for model, policy in zip(models, (None, bf16), strict=True):
        engine = VllmServer(address)
        with pytest.raises(GenerationFailed) as raised:
            engine.sync(fully_shard(model, mp_policy=policy))
        engine.close()
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_an_update_is_refused(folder: Path, server: RealServer) -> None:
    words = (
        "has vocab_size 300, and the policy 301: start it with the policy",
        "computes in float32, and the policy in bfloat16: start it with --dtype bfloat16",
    )
    first, second = ranks.run(_refused, 2, str(folder / "start"), server.address)
    for one, other, wanted in zip(first, second, words, strict=True):
        assert_one_line(
            one,
            rf"Refused: the server at {server.address} refused POST /init_weight\w+ with status 500: .Call.* {wanted}",
        )
        assert_one_line(other, rf"WeightsNotRead: the vLLM server did not read the policy \(rank 0: .*{wanted}")
