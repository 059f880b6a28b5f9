"""Asks a vLLM server to read a job's policy: a few requests, and no tensors.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs \\
        --weight-transfer-config '{"backend": "odc"}'
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from torch import nn

from ...base.errors import GenerationFailed, OfRanks, describe
from ...checkpoint.adapter import lora_factors
from ...engine.api import engine_of
from ...policy.offer import PolicyOffer
from .adapter import adapter_folder, takes_adapter
from .http import Refused, Server

OLDEST = "0.32"  # of vLLM
SHORT_S = 30.0  # for answers that need no work
_ASKS = 0  # the rank that asks the server to read
_ALLOWS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_COMPARED = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "odc"}'"""
)


def is_too_old(version: str) -> bool:
    """False for what is no version, as "dev" of a source tree without tags."""
    try:
        return Version(version).release < Version(OLDEST).release
    except InvalidVersion:
        return False


def difference(theirs: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """The first difference between two models by their transformers configs, in words; None if they are alike.

    `theirs`: of vLLM's model; `mine`: of the policy, of which vLLM would not take a head that it ties.
    """
    ties = [
        config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings"))
        for config in (theirs, mine)
    ]
    if ties[0] and ties[1] is False:  # it would drop the head
        return (
            "ties its head to its embeddings, and the policy's differ: write false for tie_word_embeddings in its "
            "config.json, or leave lm_head and embed_tokens out of the adapter"
        )
    theirs, mine = (config.get("text_config") or config for config in (theirs, mine))
    for name in _COMPARED:
        if theirs.get(name) != mine.get(name):
            return f"has {name} {theirs.get(name)}, and the policy {mine.get(name)}: start it with the policy's model"
    return None


class WeightsNotRead(OfRanks, GenerationFailed):
    """Raised on the other ranks if the server did not read the policy."""


class PolicyServer:
    """The vLLM server at `address`, such as http://127.0.0.1:8000. `timeout_s`: of one request.

    Calls raise GenerationFailed if it is gone, late, or refuses.
    """

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        self.http, self._timeout_s = Server(address), timeout_s
        self._policy: str | None = None  # what it reads
        self._takes_adapter: bool | None = None
        self.adapter: str | None = None  # the name of the policy's adapter, if it has that alone

    def check(self, *, config: Any = None, dtype: str | None = None, tokens: int = 0) -> None:
        """Checks that the server can serve this job, so that it fails before its ranks start, with the remedy.

        `config`: the policy's, of transformers; `dtype`: its compute dtype's name; `tokens`: the most of a prompt with
        its completion.
        """
        http = self.http
        http.get("/health", timeout_s=SHORT_S)
        with socket.create_connection((http.host, http.port), timeout=SHORT_S) as connection:
            is_here = connection.getsockname()[0] == connection.getpeername()[0]
        try:
            version = self.part(answer := http.get("/version", timeout_s=SHORT_S), lambda: answer["version"])
            answer = http.get("/server_info?config_format=json", timeout_s=SHORT_S)
        except Refused as refusal:
            raise GenerationFailed(f"{refusal}; {_START}") from None
        found = self.part(answer, lambda: answer["vllm_config"])
        transfer, model = found.get("weight_transfer_config") or {}, found.get("model_config") or {}
        mode, longest = model.get("logprobs_mode"), model.get("max_model_len") or tokens
        theirs = str(model.get("dtype")).removeprefix("torch.")
        problem = None
        if is_too_old(version):
            problem = f"is vLLM {version}: install {OLDEST} or newer"
        elif not is_here:
            problem = "is on another host, and would read the policy from this host's memory: start it here"
        elif transfer.get("backend") != "odc":
            problem = f"can't read the policy from memory (weight_transfer_config is {transfer or None}): {_START}"
        elif model.get("skip_tokenizer_init"):
            problem = "answers no requests without its tokenizer: start it without --skip-tokenizer-init"
        elif mode != "processed_logprobs":
            problem = f"returns {mode}, not those after the temperature: {_START}"
        elif dtype is not None and theirs not in (dtype, "None"):
            problem = f"computes in {theirs}, and the policy in {dtype}: start it with --dtype {dtype}"
        elif longest < tokens:
            problem = f"takes {longest} tokens, and a prompt with its completion may have {tokens}: start it with "
            problem += f"--max-model-len {tokens}"
        elif config is not None:
            problem = self._difference(model.get("model"), config)
        if problem is not None:
            raise GenerationFailed(f"the server at {http.address} {problem}")

    def _difference(self, folder: Any, config: Any) -> str | None:
        from transformers import AutoConfig

        with contextlib.suppress(OSError, ValueError):  # not readable here: the server itself compares, later
            return difference(AutoConfig.from_pretrained(folder).to_dict(), config.to_dict())
        return None

    def _folder(self, factors: dict[str, Any]) -> str:
        answer = self.http.get("/server_info?config_format=json", timeout_s=SHORT_S)
        found, environment = self.part(answer, lambda: (answer["vllm_config"], dict(answer["vllm_env"])))
        folder, lora = self.part(answer, lambda: (found["model_config"]["model"], found.get("lora_config")))
        needs = {f"{_ALLOWS}=1": environment.get(_ALLOWS), "--enable-lora": lora}
        if missing := [name for name, has in needs.items() if not has]:
            raise ValueError(f"the server at {self.http.address} was started without {' '.join(missing)}")
        return folder

    def _load_adapter(self, model: nn.Module) -> None:
        self._load({"adapter": [*lora_factors(model)[1]]})  # the server says if it still has the base
        with adapter_folder(model) as folder:
            name = Path(folder).name
            self._update("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, is_json=False)
        self.unload()
        self.adapter = name

    def unload(self) -> None:
        """Has the server forget the adapter, if it has not."""
        if self.adapter is not None:
            with contextlib.suppress(Refused):
                self._update("/v1/unload_lora_adapter", {"lora_name": self.adapter}, is_json=False)

    def refresh(self, model: nn.Module, offer: PolicyOffer) -> None:
        """Has it read `model`, of which `offer` is, or load its adapter. Every rank calls it; rank 0 asks.

        Then a barrier. If the server did not read it, rank 0 raises the reason, the others WeightsNotRead with it.
        """
        engine, failure = engine_of(model), None
        is_first = self._takes_adapter is None
        if is_first:
            load = partial(self._load_adapter, model) if engine.rank == _ASKS else lambda: None
            self._takes_adapter = takes_adapter(model, self._folder, load, merges_packed=False)
        if engine.rank == _ASKS:
            try:
                if self._takes_adapter and not is_first:
                    self._load_adapter(model)
                elif not self._takes_adapter:
                    self._refresh(offer.address, engine.publication.number)
            except Exception as error:
                failure = error
        message = {"problem": None if failure is None else describe(failure), "adapter": self.adapter}
        answer = engine.exchange("the vLLM server reads the policy", message)[_ASKS]
        problem, self.adapter = answer["problem"], answer["adapter"]
        if failure is not None:
            raise failure
        if problem is not None:
            raise WeightsNotRead([_ASKS], f"the vLLM server did not read the policy (rank {_ASKS}: {problem})")

    def _refresh(self, policy: str, version: int) -> None:
        if policy != self._policy:
            self._update("/init_weight_transfer_engine", {"init_info": {"address": policy}})
            self._policy = policy
        self._load({}, str(version))
        answer = self.http.post("/reset_prefix_cache", timeout_s=SHORT_S)  # it is of the old weights
        if isinstance(answer, dict) and answer.get("success") is False:
            raise GenerationFailed(
                f"the server at {self.http.address} keeps its prefix cache, as others use it: give the job its own"
            )

    def _load(self, info: dict[str, Any], version: str | None = None) -> None:
        try:
            self._update("/start_weight_update", {})
        except Refused:  # as another job has begun an update and not finished it
            self._update("/finish_weight_update", {})
            self._update("/start_weight_update", {})
        self._update("/update_weights", {"update_info": info})
        self._update("/finish_weight_update", {} if version is None else {"weight_version": version})

    def _update(self, path: str, content: dict[str, Any], *, is_json: bool = True) -> None:
        self.http.post(path, content, timeout_s=self._timeout_s, is_json=is_json)

    def part(self, answer: Any, take: Callable[[], Any]) -> Any:
        """`take()`, of an answer that must be vLLM's."""
        try:
            return take()
        except (AttributeError, KeyError, TypeError, IndexError):
            raise GenerationFailed(
                f"the server at {self.http.address} gave an answer that is not vLLM's: {str(answer)[:300]!r}"
            ) from None
