"""verl's FSDP engine on two CPU ranks: THIS_FILE MODEL STEPS OUT OPTIMIZER RATE [VERL]

MODEL is a Hugging Face folder. STEPS is a file of torch.save: by step {"how": ..., "ranks": each rank's samples}, where
a sample has `ids` and the length of its `prompt`. How: "fixed" (one sample a microbatch), "dynamic" (microbatches of at
most 40 tokens) and "policy", which is dynamic, by PPO's loss: the engine infers the old log-probabilities first.
The weights, as verl sends them to its rollouts, go to OUT. VERL: a folder with another copy of verl.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

MODEL, STEPS, OUT, OPTIMIZER, RATE, *VERL = sys.argv[1:]
sys.path[:0] = VERL

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss  # noqa: E402
from verl.workers.utils.padding import response_from_nested  # noqa: E402

_ACTOR = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)


def engine() -> FSDPEngineWithLMHead:
    attention = {"attn_implementation": "sdpa"}
    made = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=MODEL, use_remove_padding=False, enable_gradient_checkpointing=False, override_config=attention
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"}
        ),
        optimizer_config=FSDPOptimizerConfig(lr=float(RATE), total_training_steps=100, optimizer=OPTIMIZER),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def nested(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def batch(how: str, samples: list[dict[str, Any]], of_all_ranks: int) -> Any:
    """A rank's samples of one step, as verl's trainers give them to an engine."""
    prompts = [sample["ids"][: sample["prompt"]] for sample in samples]
    responses = [sample["ids"][sample["prompt"] :] for sample in samples]
    both = list(zip(prompts, responses, strict=True))
    fields = {
        "input_ids": nested([sample["ids"] for sample in samples]),
        "position_ids": nested([torch.arange(len(sample["ids"])) for sample in samples]),
        "loss_mask": nested([torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in both]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested([torch.ones(len(r)) for r in responses]),
        "advantages": nested([torch.sin(r.float()) for r in responses]),
    }
    options = {
        "use_remove_padding": False,
        "use_dynamic_bsz": how != "fixed",
        "max_token_len_per_gpu": 40,
        "micro_batch_size_per_gpu": 1,
        "temperature": 1.0,
        "pad_mode": "no_padding",
        "global_batch_size": of_all_ranks,
    }
    return tu.get_tensordict(fields, options)


def train(trained: FSDPEngineWithLMHead, how: str, ranks: list[list[dict[str, Any]]]) -> None:
    data = batch(how, ranks[dist.get_rank()], sum(map(len, ranks)))
    loss = partial(sft_loss, config=None)
    if how == "policy":
        with trained.eval_mode():
            old = trained.infer_batch(data)["model_output"]["log_probs"]
        data["old_log_probs"] = response_from_nested(old, data["response_mask"])
        loss = partial(ppo_loss, config=_ACTOR)
    with trained.train_mode():
        metrics = trained.train_batch(data, loss_function=loss)["metrics"]
    trained.lr_scheduler_step()
    if dist.get_rank() == 0:
        print(how, metrics["grad_norm"], flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    trained = engine()
    for step in torch.load(STEPS, weights_only=True):
        train(trained, step["how"], step["ranks"])
    weights, _ = trained.get_per_tensor_param()
    whole = {name: value.detach().clone() for name, value in weights}  # gathered by all ranks
    if dist.get_rank() == 0:
        torch.save(whole, OUT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
