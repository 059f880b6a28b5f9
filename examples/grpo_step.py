"""One update of GRPO (arXiv 2402.03300, section 4.1): completions and rewards in, one optimizer step out.

For completion i of a group, with reward r_i, and its token t, of probability p under the policy, q under the one that
sampled it and ref under the reference:

    A_i    = (r_i - mean(r)) / (std(r) + 1e-4)           over the completions of the same prompt
    L_it   = -min(p/q A_i, clip(p/q, 1-clip, 1+clip) A_i) + kl (ref/p - log(ref/p) - 1)

and the loss is the mean of L over the tokens of all completions on all ranks (as in DAPO, arXiv 2503.14476). Ranks
may have any number of completions. torchrun --nproc-per-node 2 examples/grpo_step.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from odc_triton import fully_shard, log_probs, minibatch, replace_layers
from odc_triton.balance.collate import IGNORED, count_target_tokens, pack_collate, to_device
from odc_triton.hf import enable_packing, model_inputs


@dataclass(frozen=True, kw_only=True)
class Completion:
    """ids [T] of prompt and completion; the log-probabilities are those of the completion's n tokens, [n]."""

    ids: list[int]
    prompt_tokens: int  # at least 1
    advantage: float
    old_logp: Tensor  # under the policy that sampled it
    ref_logp: Tensor | None = None  # under the reference policy; needed if kl > 0


def group_advantages(rewards: Tensor) -> Tensor:
    """rewards [prompts, completions of each] -> advantages, of the same shape."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def token_logp(model: nn.Module, completions: list[Completion]) -> tuple[dict[str, Tensor], Tensor]:
    """One pack of completions and the log-probabilities of all their tokens, [n], in their order."""
    samples = [
        {"input_ids": c.ids, "labels": [IGNORED] * c.prompt_tokens + c.ids[c.prompt_tokens :]} for c in completions
    ]
    (pack,) = pack_collate([samples])
    pack = to_device(pack, model.device)
    positions = pack["target_positions"]
    logits = model(**model_inputs(pack, model), logits_to_keep=positions).logits[0]
    return pack, log_probs(logits, pack["labels"][0, positions + 1]).logp


def token_losses(logp: Tensor, completions: list[Completion], clip: float, kl: float) -> Tensor:
    """L of every token, [n]."""
    old = torch.cat([c.old_logp for c in completions]).to(logp.device)
    advantage = torch.cat([torch.full_like(c.old_logp, c.advantage) for c in completions]).to(logp.device)
    ratio = (logp - old).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    if kl:
        behind = torch.cat([c.ref_logp for c in completions]).to(logp.device) - logp
        losses = losses + kl * (behind.exp() - behind - 1)
    return losses


def grpo_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    packs: list[list[Completion]],
    *,
    clip: float = 0.2,
    kl: float = 0.0,
    clip_norm: float = 1.0,
) -> dict[str, float]:
    """One optimizer step on this rank's packs of completions, any number of them. Returns metrics of all ranks."""
    sums = torch.zeros(2, device=model.device)  # loss, tokens whose ratio was out of range
    tokens = sum(len(c.old_logp) for pack in packs for c in pack)
    with minibatch(model, tokens=tokens) as mb:
        for completions in packs:
            pack, logp = token_logp(model, completions)
            assert count_target_tokens([pack]) == sum(len(c.old_logp) for c in completions)
            losses = token_losses(logp, completions, clip, kl)
            (losses.sum() / mb.tokens).backward()
            old = torch.cat([c.old_logp for c in completions]).to(logp.device)
            outside = ((logp.detach() - old).exp() - 1).abs() > clip
            sums += torch.stack([losses.detach().sum(), outside.sum()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(sums)
    loss, outside = (sums / mb.tokens).tolist()
    return {"loss": loss, "outside": outside, "grad_norm": norm.item(), "tokens": mb.tokens}


def main() -> None:
    """Learns to write even tokens: four prompts, eight random completions each, rewarded by their even tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    enable_packing(model)
    replace_layers(model, roles=["head"], verbose=False)  # logits are never computed
    model = fully_shard(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    for update in range(4):
        generator = torch.Generator().manual_seed(update)
        lengths = torch.randint(4, 40, (4, 8), generator=generator)
        texts = [[torch.randint(64, (5 + n,), generator=generator).tolist() for n in row] for row in lengths.tolist()]
        rewards = torch.tensor([[sum(t % 2 == 0 for t in text[5:]) / len(text[5:]) for text in row] for row in texts])
        advantages = group_advantages(rewards)
        packs = []  # one per prompt; of two ranks the first has three, the second one
        for group in (group for group in range(4) if group // 3 % world == rank):
            pairs = zip(texts[group], advantages[group].tolist(), strict=True)
            pack = [Completion(ids=ids, prompt_tokens=5, advantage=a, old_logp=torch.empty(0)) for ids, a in pairs]
            with torch.no_grad():
                _, logp = token_logp(model, pack)
            parts = logp.split([len(c.ids) - c.prompt_tokens for c in pack])
            packs.append([replace(c, old_logp=p, ref_logp=p) for c, p in zip(pack, parts, strict=True)])
        for epoch in range(2):
            metrics = grpo_step(model, optimizer, packs, kl=0.01)
            if rank == 0:
                words = " ".join(f"{name} {value:.5g}" for name, value in metrics.items())
                print(f"update {update} epoch {epoch} {words}")
    ids = torch.arange(64, device=model.device)[None]
    model.eval()
    with torch.no_grad():
        chances = model(input_ids=ids, use_cache=False).logits[0].float().softmax(-1)
    if rank == 0:
        print(f"chance of an even token {chances[:, ::2].sum(-1).mean():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
