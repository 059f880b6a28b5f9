"""verl's FSDP engine, as its trainers call it, and its SFT trainer: unmodified, and with examples/recipe_verl.diff."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.programs.harness import Program, Run, interpreter, run, run_both, script
from tests.support.chats import CHATML, make_tokenizer

RECIPE = Path(__file__).parents[2] / "examples" / "recipe_verl.diff"
ENVIRONMENT = "verl"
PACKAGES = ("verl", "transformers")
PLATFORM = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's registry has engines of GPUs only
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "PYTHONPATH": script("."),
}
VOCABULARY = 400
RATES = {"SGD": 1e-2, "AdamW": 1e-3}
# AdamW divides by the size of gradients, also where that is mostly rounding: of the biases of attention's keys.
WITHIN = {"SGD": 1e-8, "AdamW": 1e-5}
WAYS = ("automatic", "recipe")

Step = dict[str, Any]  # how it is trained, and each rank's samples: scripts/verl_engine.py


def _model(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, **heads, vocab_size=VOCABULARY, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def _steps(*steps: tuple[str, tuple[int, int]]) -> list[Step]:
    """By step, how it is trained and how many samples each rank has."""
    generator = torch.Generator().manual_seed(1)

    def sample() -> dict[str, Any]:
        length, prompt = (int(torch.randint(*bounds, (), generator=generator)) for bounds in ((6, 31), (2, 5)))
        # Not 0: that is verl's padding, whose embedding gets no gradient.
        return {"ids": torch.randint(1, VOCABULARY, (length,), generator=generator), "prompt": prompt}

    return [{"how": how, "ranks": [[sample() for _ in range(count)] for count in counts]} for how, counts in steps]


def _patched(folder: Path) -> str:
    """A copy of the environment's verl with the recipe's lines: the folder to import it from."""
    (installed,) = interpreter(ENVIRONMENT).parents[1].glob("lib/python3.*/site-packages/verl")
    shutil.copytree(installed, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(RECIPE)], cwd=folder, check=True)
    return str(folder)


def _program(way: str, optimizer: str, steps: list[Step], folder: Path) -> Program:
    torch.save(steps, folder / "steps.pt")
    files = (folder / "model", folder / "steps.pt", "{out}/weights.pt")
    words = [script("verl_engine.py"), *map(str, files), optimizer, str(RATES[optimizer])]
    return Program(
        name=f"verl's FSDP engine, {optimizer}, {way}",
        words=words,
        words_with_odc=[*words, _patched(folder / "patched")] if way == "recipe" else None,
        environment=ENVIRONMENT,
        packages=PACKAGES,
        variables=PLATFORM,
    )


def _assert_same(trained: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], within: float) -> None:
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        # Besides `within` the last bit of a float32: norms' weights are near 1.
        tolerance = {"rtol": 2**-23, "atol": within}
        torch.testing.assert_close(trained[name], value, **tolerance, msg=lambda text, n=name: f"{n}: {text}")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", RATES)
def test_train_batch(optimizer: str, way: str, tmp_path: Path) -> None:
    _model(tmp_path / "model")
    # First the engine infers, without gradients.
    steps = _steps(*[(how, (4, 4)) for how in ("policy", "fixed", "dynamic")] * 2)
    outcome = run_both(_program(way, optimizer, steps, tmp_path), tmp_path)
    if way == "automatic":
        assert (outcome.minibatches, outcome.waits) == (len(steps), 2 * len(steps))
    else:
        assert "use_odc: 5 units" in (tmp_path / "odc" / "output.log").read_text()
    _assert_same(_weights(tmp_path / "odc"), _weights(tmp_path / "plain"), WITHIN[optimizer])


# Unmodified, verl makes the numbers of dynamic microbatches equal itself.
UNEVEN = {
    "automatic": _steps(("fixed", (4, 1)), ("fixed", (1, 3)), ("fixed", (2, 5))),
    "recipe": _steps(("dynamic", (6, 1)), ("fixed", (1, 3)), ("dynamic", (2, 7))),
}


@pytest.mark.parametrize("way", WAYS)
def test_unequal_numbers_of_microbatches(way: str, tmp_path: Path) -> None:
    """FSDP2 would wait for ever: compared with one process, by plain torch."""
    model = _model(tmp_path / "model")
    done: Run = run(_program(way, "SGD", UNEVEN[way], tmp_path), tmp_path / "odc", with_odc=True)
    _train_alone(model, UNEVEN[way])
    _assert_same(done.weights(), model.state_dict(), WITHIN["SGD"])


def _train_alone(model: nn.Module, steps: list[Step]) -> None:
    """The mean loss of the responses' tokens of all ranks, sample by sample."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES["SGD"], weight_decay=1e-2)  # verl's default
    for step in steps:
        samples = [sample for mine in step["ranks"] for sample in mine]
        summed = torch.zeros(())
        for sample in samples:
            ids, prompt = sample["ids"], sample["prompt"]
            logits = model(input_ids=ids[None]).logits[0, prompt - 1 : -1]
            summed = summed + nn.functional.cross_entropy(logits, ids[prompt:], reduction="sum")
        (summed / sum(len(sample["ids"]) - sample["prompt"] for sample in samples)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


SFT = (  # of verl.trainer.sft_trainer
    "data.train_batch_size=16 data.use_dynamic_bsz=True data.max_token_len_per_gpu=150 data.num_workers=0 "
    "data.ignore_input_ids_mismatch=True model.use_remove_padding=False engine.strategy=fsdp2 optim.lr=1e-3 "
    "engine.use_torch_compile=False +engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32} "
    "+model.override_config.attn_implementation=sdpa trainer.device=cpu trainer.logger=[console] trainer.save_freq=2 "
    "trainer.total_epochs=2 trainer.resume_mode=disable checkpoint.save_contents=[model,hf_model]"
)


def test_sft_trainer(tmp_path: Path) -> None:
    """It saves after every second step, and first moves the model to its device."""
    _model(tmp_path / "model")
    make_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    _write_chats(tmp_path / "chats.parquet")
    files = {"data.train_files": tmp_path / "chats.parquet", "model.path": tmp_path / "model"}
    program = Program(
        name="verl's SFT trainer, AdamW",
        words=[
            *("-m", "verl.trainer.sft_trainer", *SFT.split(), "trainer.default_local_dir={out}"),
            *(f"{key}={file}" for key, file in files.items()),
        ],
        environment=ENVIRONMENT,
        packages=PACKAGES,
        variables=PLATFORM,
    )
    outcome = run_both(program, tmp_path)
    # A wait more than usual: what was moved is published anew, before the third step.
    assert (outcome.minibatches, outcome.waits) == (4, 9)
    assert outcome.difference <= WITHIN["AdamW"]


def _write_chats(file: Path) -> None:
    from datasets import Dataset

    words, drawn = ("the", "user", "asks", "and", "the", "assistant", "says", "yes", "no", "again"), random.Random(0)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(drawn.choices(words, k=drawn.randint(1, 30)))}

    Dataset.from_list([{"messages": [turn("user"), turn("assistant")]} for _ in range(32)]).to_parquet(file)
