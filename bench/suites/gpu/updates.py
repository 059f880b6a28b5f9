"""Updates of a model of 1.5 B parameters in this process: shared prompts, ways to train, one long sample."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odc_triton import replace_layers
from odc_triton.balance import to_device
from odc_triton.hf import compute_in_chunks, offload_checkpoints
from odc_triton.packs.collate import count_target_tokens
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.plan import MinibatchPacks

from ...device import Gpu, profiled
from ...harness import Minibatch, Work, assign_packs, timed
from ...stdlib_corpus import qwen2
from ...trees import TREES
from ...variants import Bridged, Fsdp2Micro, Odc, OdcTrees, Setting, Unsharded, Variant

QWEN_1_5B = qwen2(151936, 1536, 8960, 28, 12, 2, 131072, True)
SMALL = qwen2(128, 32, 64, 2, 2, 1, 512, True)
LONGEST = 6144  # tokens of a pack: 8,192 may not fit in 80 GB, beside the states
_WORDS = 128  # token ids are below it: any model has them
_KEPT = 14  # kernels of a minibatch to name, the longest
_ERROR_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class GivenWork(Work):
    """`samples`, all in one minibatch, and a model that `device` draws: a host takes half a minute for it."""

    samples: Sequence[dict[str, torch.Tensor]]
    device: str
    checkpointing: bool = False

    @classmethod
    def of(cls, gpu: Gpu, samples: Sequence[dict[str, torch.Tensor]], token_cap: int, **more: Any) -> GivenWork:
        config = SMALL if gpu.rehearsal else QWEN_1_5B
        given = {"dataset": "", "config": config, "minibatches": [list(range(len(samples)))], "token_cap": token_cap}
        return cls(samples=samples, device=gpu.type, **given, **more)

    def build(self) -> nn.Module:
        with torch.device(self.device):
            model = super().build()
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def data(self) -> GivenWork:
        return self

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]

    @property
    def lengths(self) -> list[int]:
        return [len(each["input_ids"]) for each in self.samples]

    def packs(self, balance: str) -> MinibatchPacks:
        return assign_packs(self, self, self.minibatches[0], balance, self.cost(), ranks=1)[0]


def made(kind: type[Variant], work: GivenWork, gpu: Gpu) -> Variant:
    return kind(work.build, Setting(device=gpu.type, dtype="fp32" if gpu.rehearsal else "bf16"))


def trained(variant: Variant, packs: MinibatchPacks, number: int) -> Minibatch:
    return timed(variant, packs, count_target_tokens(packs), number)


class OdcHead(Odc):
    name = "ODC, fused head"

    def shard(self, model: nn.Module) -> nn.Module:
        replace_layers(model, roles=("head",), verbose=False)
        return super().shard(model)


# The first two once more at the end: what differs between their turns is the machine's doing.
KINDS = {"plain torch": Unsharded, "ODC": Odc, "ODC, fused head": OdcHead, "FSDP2": Fsdp2Micro, "use_odc": Bridged}
TURNS = (*KINDS, "plain torch", "ODC")


def rows(gpu: Gpu, *, least: float) -> Iterator[dict[str, Any]]:
    """Two packs of several samples a minibatch, by each way to train. `least`: ODC's speed over plain torch's."""
    draw, cap = random.Random(0), 64
    if not gpu.rehearsal:
        cap = 8192 if torch.cuda.mem_get_info()[1] > 100e9 else LONGEST
    lengths = [cap // 2, cap // 4, cap // 8, cap // 8, cap - cap // 3, cap // 3]
    work = GivenWork.of(gpu, [{"input_ids": _drawn(draw, length)} for length in lengths], cap)
    flops, speeds = sum(map(work.cost().sequence, lengths)), {name: [] for name in KINDS}
    for turn, name in enumerate(TURNS):
        before, start_s, variant = gpu.forget(), time.monotonic(), None
        try:
            variant = made(KINDS[name], work, gpu)
            packs, made_s = work.packs(variant.balance), time.monotonic() - start_s
            ran = [trained(variant, packs, number) for number in range(8)][3:]
            seconds = statistics.median(each.seconds for each in ran)
            speeds[name].append(sum(lengths) / seconds)
            line = {"seconds": [each.seconds for each in ran], "step_s": [each.step_seconds for each in ran]}
            line |= {"tokens_per_s": speeds[name][-1], "tflops": flops / seconds / 1e12, "loss": ran[-1].loss}
            line |= {"peak_gb": gpu.peak_gb() - before, "made_s": made_s, "microbatches": len(packs)}
            if not gpu.rehearsal and turn < len(KINDS):
                try:
                    line |= _profiled(variant, packs)
                except Exception as error:  # as where containers allow no profiling: the numbers count
                    line["profile_error"] = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        except Exception as error:  # the others are worth knowing
            line = {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
        del variant
        yield {"what": name, "turn": turn, **line}
    if speeds["ODC"] and speeds["plain torch"]:
        ratio = max(speeds["ODC"]) / max(speeds["plain torch"])
        yield {"what": "ODC over plain torch", "ratio": ratio, "passed": gpu.rehearsal or ratio >= least}


def _profiled(variant: Variant, packs: MinibatchPacks) -> dict[str, Any]:
    """Of one more minibatch: milliseconds of the longest kernels, and the share of time in which any ran."""
    ran, kernels = profiled(lambda: trained(variant, packs, 99))
    ms: dict[str, float] = {}
    busy_s, until_s = 0.0, 0.0
    for name, start_s, end_s in sorted(kernels, key=lambda each: each[1]):
        ms[name[:70]] = ms.get(name[:70], 0.0) + (end_s - start_s) * 1e3
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    longest = dict(sorted(ms.items(), key=lambda each: -each[1])[:_KEPT])
    return {"busy_share": busy_s / ran.seconds, "kernels_ms": longest}


def group(
    gpu: Gpu, *, prompt: int, completion: int, size: int, of: int = 1, off: float, least: float = 0.0
) -> Iterator[dict[str, Any]]:
    """`of` prompts with `size` completions each, which alone are learned: unshared prompts, and prompts computed once.
    `off`: how far gradients may be apart; `least`: how many times faster the latter must be.
    """
    if gpu.rehearsal:
        prompt, completion = prompt // 64, completion // 64
    draw, samples = random.Random(0), []
    for _ in range(of):
        shared = _drawn(draw, prompt)
        for _ in range(size):
            own = _drawn(draw, draw.randint(completion // 2, completion * 3 // 2))
            labels = torch.cat([torch.full_like(shared, IGNORED), own])
            samples.append({"input_ids": torch.cat([shared, own]), "labels": labels})
    lengths = [len(each["input_ids"]) for each in samples]
    cap = 2 * max(lengths)
    tree = prompt + sum(length - prompt + 1 for length in lengths) if of == 1 else 0  # in one pack
    works = {"whole": GivenWork.of(gpu, samples, cap), "shared": GivenWork.of(gpu, samples, max(tree, cap) + 64)}
    caps = {way: work.token_cap for way, work in works.items()}
    yield {"what": "sizes", "samples": len(samples), "tokens": sum(lengths), "token_caps": caps}
    for name, kind in (("ODC", OdcTrees), ("plain torch", Unsharded)):
        before, variant = gpu.forget(), None
        variant = made(kind, works["whole"], gpu)
        packs = {way: work.packs({"whole": "mini", "shared": TREES}[way]) for way, work in works.items()}
        found = {way: _gradients(variant, packs[way], gpu) for way in packs}  # the same, but for bf16
        apart = float((found["shared"] - found["whole"]).norm() / found["whole"].norm())
        del found
        took: dict[str, list[float]] = {way: [] for way in packs}
        peaks = {}
        for turn in range(5):
            for way in packs if turn % 2 else reversed(packs):
                if not turn:
                    gpu.forget()
                ran = trained(variant, packs[way], turn)
                peaks.setdefault(way, gpu.peak_gb() - before)
                took[way] += [ran.seconds] * (turn > 0)
        ratio = statistics.median(a / b for a, b in zip(took["whole"], took["shared"], strict=True))
        computed = {way: sum(each["input_ids"].numel() for each in of) for way, of in packs.items()}
        line = {"seconds": took, "peak_gb": peaks, "tokens": computed, "packs": {way: len(packs[way]) for way in packs}}
        passed = apart < off and (gpu.rehearsal or ratio > least)
        del variant, packs
        yield {"what": name, "ratio": ratio, "gradients_off": apart, "passed": passed, **line}


def _drawn(draw: random.Random, count: int) -> torch.Tensor:
    return torch.tensor([draw.randrange(_WORDS) for _ in range(count)])


def _gradients(variant: Variant, packs: MinibatchPacks, gpu: Gpu) -> torch.Tensor:
    """Of the second layer and the embedding, one after another."""
    here = MinibatchPacks.like(packs, (to_device(each, gpu.type) for each in packs))
    variant.gradients(here, count_target_tokens(packs))
    picked = [p.grad for name, p in variant.model.named_parameters() if "layers.1." in name or "embed" in name]
    found = torch.cat([getattr(each, "to_local", lambda each=each: each)().float().flatten() for each in picked])
    variant.optimizer.zero_grad()
    return found


def long(gpu: Gpu, *, tokens: int, off: float) -> Iterator[dict[str, Any]]:
    """One sample, layers checkpointed: what chunks and offloading save, and cost. The loss may be `off` apart."""
    if gpu.rehearsal:
        tokens //= 128
    ids = torch.randint(_WORDS, (tokens,), generator=torch.Generator().manual_seed(0))
    work, losses = GivenWork.of(gpu, [{"input_ids": ids}], tokens, checkpointing=True), []
    ways: dict[str, tuple[Callable[[nn.Module], Any], ...]] = {
        "checkpointed": (),
        "in chunks": (compute_in_chunks,),
        "offloaded": (compute_in_chunks, offload_checkpoints),
    }
    for name, changes in ways.items():
        before, variant = gpu.forget(), None
        try:
            variant = made(OdcHead, work, gpu)
            for change in changes:
                change(variant.model)
            ran = [trained(variant, work.packs("mini"), number) for number in range(2)]
            losses.append(ran[1].loss)  # after a step, so that its backward counts
            alike = abs(losses[-1] - losses[0]) <= off * abs(losses[0])  # bf16 in another order
            line = {"passed": alike, "loss": losses[-1], "seconds": [each.seconds for each in ran]}
            line |= {"peak_gb": gpu.peak_gb() - before}
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
        del variant
        yield {"what": name, "tokens": tokens, **line}
