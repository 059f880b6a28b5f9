"""`train dpo`, `train orpo` and `train reward`: what they read, and that they learn as plain torch does."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from odc_triton.checkpoint import meta_causal_lm
from odc_triton.checkpoint.base_model import frozen_base
from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset, split_samples, tokenize_source
from odc_triton.jobs.data.preferences import PairSource, pair_of
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import RecordRows
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer, to_transformers
from odc_triton.jobs.train.model import name_special_tokens
from odc_triton.jobs.train.model_card import write_card
from odc_triton.jobs.train.pairs_options import DpoOptions, OrpoOptions, PairOptions, RewardOptions
from odc_triton.jobs.train.pairs_run import PairRun, _Scored
from odc_triton.plan.order import Mix, in_passes
from odc_triton.tools.cli import main
from tests.support import jobs, ranks, slow
from tests.support.sft_case import case, write_case

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
QUESTION, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "2 + 2?"), ("assistant", "4"), ("assistant", "5"))
)
ROWS: list[tuple[dict[str, Any], tuple[Any, Any, Any]]] = [  # a row: its prompt, what is chosen, what is rejected
    ({"prompt": "2 + 2? ", "chosen": "4", "rejected": "5"}, ("2 + 2? ", "4", "5")),
    ({"chosen": "2 + 2 is 4", "rejected": "2 + 2 is 5"}, ("2 + 2 is", " 4", " 5")),
    ({"chosen": "It is yellow", "rejected": "It is yelp"}, ("It is", " yellow", " yelp")),
    ({"prompt": [QUESTION], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, ([QUESTION], [GOOD], [BAD])),
    ({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, ([QUESTION], [GOOD], [BAD])),
    ({"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]}, ([QUESTION], [GOOD], [BAD])),
    ({"prompt": "2 + 2?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, ([QUESTION], [GOOD], [BAD])),
    (
        {"chosen": [*CHAT, QUESTION, GOOD], "rejected": [*CHAT, QUESTION, BAD], "score": 3},
        ([*CHAT, QUESTION], [GOOD], [BAD]),
    ),
    ({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, GOOD]}, ([QUESTION], [GOOD], [GOOD])),
]
REFUSED: list[tuple[Any, str]] = [
    ([1], "row 0: a list, not an object with 'chosen' and 'rejected'"),
    ({"prompt": "a", "completion": "b"}, "row 0: has no 'chosen' and no 'rejected'"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "row 0: has no 'rejected'"),
    ({"chosen": "b", "rejected": [BAD]}, "'chosen' is a string and 'rejected' is a list"),
    ({"prompt": "a", "chosen": 1, "rejected": "b"}, "row 0, chosen: 'chosen' must be a string, not a number"),
    ({"prompt": [QUESTION], "chosen": "b", "rejected": "c"}, "row 0, chosen: 'prompt' is a list and 'chosen' is"),
    ({"chosen": [QUESTION], "rejected": []}, "begin with different messages, or have none, and there is no 'prompt'"),
    ({"chosen": CHAT, "rejected": [QUESTION, BAD]}, "give the turns before them as 'prompt'"),
]


@pytest.mark.parametrize(("row", "wanted"), ROWS)
def test_rows(row: dict[str, Any], wanted: tuple[Any, Any, Any]) -> None:
    prompt, *answers = wanted
    for record, answer in zip(pair_of("row 0", row), answers, strict=True):
        if isinstance(prompt, str):
            assert (record.prompt, record.completion) == (prompt, answer)
        else:
            assert (record.messages, record.learned_from) == (prompt + answer, len(prompt))


@pytest.mark.parametrize(("row", "said"), REFUSED)
def test_rows_that_are_none(row: Any, said: str) -> None:
    with pytest.raises(DataError) as refused:
        pair_of("row 0", row)
    assert said in str(refused.value)


STEPS, PER_STEP = 3, 4
KINDS: dict[str, type[PairOptions]] = {"dpo": DpoOptions, "orpo": OrpoOptions, "reward": RewardOptions}
RESUMED = ("dpo", "reward")  # orpo has no state that dpo does not have
Pairs = list[list[tuple[Tensor, int]]]  # of each pair its two samples: tokens [1, T], how many are the prompt's


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("pairs"), config={"tie_word_embeddings": False})
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": each["prompt"], "chosen": each["completion"], "rejected": other["completion"][: 20 + 5 * (n % 7)]}
        for n, (each, other) in enumerate(zip(records, records[5:], strict=False))
    ]
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config.json"))
    model.save_pretrained(folder / "base")
    return folder


def options(folder: Path, job: str, **changes: Any) -> PairOptions:
    names = {each.name for each in fields(KINDS[job])}
    wanted = {name: value for name, value in vars(case(folder)).items() if name in names}
    wanted |= {"data": (str(folder / "pairs.jsonl"),), "out": str(folder / "out" / job), "pairs_per_rank": 2}
    wanted |= {"model": str(folder / "base"), "init": None, "optimizer": "sgd", "lr": 0.1, "steps": STEPS}
    wanted |= {"share_prefixes": "auto", "warmup_steps": 0, "schedule": "constant"}
    wanted |= {"token_cap": 400, "clip_norm": 100.0}
    return KINDS[job](**wanted | changes)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    """By job a run of three steps. Beside it one with adapters, and of `RESUMED` one that was stopped and continued."""
    wanted = [options(folder, job) for job in KINDS]
    stopped = [replace(each, out=f"{each.out}-resumed") for each in wanted if each.job in RESUMED]
    adapted = [replace(each, out=f"{each.out}-lora", lora_rank=2, eval_fraction=0.2) for each in wanted]
    assert jobs.run(2, *stopped, stop_after=1) == [jobs.STOPPED] * 2
    resumed = [replace(each, resume="auto") for each in stopped]
    assert jobs.run(2, *wanted, *adapted, *resumed) == [jobs.ENDED] * 8
    return {each.job: Path(each.out) for each in wanted}


def pairs_in(folder: Path) -> Pairs:
    encoder = TextEncoder.of(load_tokenizer(folder / "tokenizer.json"))
    found: Pairs = []
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.append([])
        for side in ("chosen", "rejected"):
            prompt, completion = encoder.encode_batch([row["prompt"], row[side]])
            head = [*encoder.begun(encoder.before_prompt, prompt), *encoder.before_completion]
            ids = [*head, *completion, encoder.end_id]
            found[-1].append((torch.tensor([ids]), len(head)))
    return found


def _logp(model: nn.Module, ids: Tensor, learned_from: int) -> Tensor:
    logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logp[learned_from - 1 :]


def _loss(job: str, model: nn.Module, frozen: nn.Module, pairs: Pairs) -> Tensor:
    if job == "reward":
        scores = [[model(input_ids=ids).logits[0, 0] for ids, _ in pair] for pair in pairs]
        return torch.stack([-F.logsigmoid(chosen - rejected) for chosen, rejected in scores]).mean()
    if job == "dpo":
        ratios = [[(_logp(model, *each) - _logp(frozen, *each).detach()).sum() for each in pair] for pair in pairs]
        return torch.stack([-F.logsigmoid(0.1 * (chosen - rejected)) for chosen, rejected in ratios]).mean()
    nll = -torch.cat([_logp(model, ids, 1) for (ids, _), _ in pairs]).mean()
    means = torch.stack([torch.stack([_logp(model, *each).mean() for each in pair]) for pair in pairs])
    odds = means - torch.log1p(-means.exp())
    return nll - 0.1 * F.logsigmoid(odds[:, 0] - odds[:, 1]).mean()


@pytest.mark.parametrize("job", KINDS)
def test_it_learns_as_plain_torch(job: str, folder: Path, runs: dict[str, Path]) -> None:
    auto: Any = AutoModelForSequenceClassification if job == "reward" else AutoModelForCausalLM
    trained, seen = auto.from_pretrained(runs[job] / "model"), jobs.lines(runs[job])
    frozen = AutoModelForCausalLM.from_pretrained(folder / "base")
    model = auto.from_pretrained(folder / "base")
    if job == "reward":  # its score's start is random: that of a run that learns nothing
        still = options(folder, job, lr=1e-30, out=str(folder / "out" / "still"), steps=1)
        assert jobs.run(1, still) == [jobs.ENDED]
        model = auto.from_pretrained(folder / "out" / "still" / "model")
        same = frozen.state_dict().keys() & model.state_dict().keys()
        assert len(same) == len(model.state_dict()) - 1
        assert all(torch.allclose(frozen.state_dict()[name], model.state_dict()[name], atol=1e-20) for name in same)
    optimizer, every = torch.optim.SGD(model.parameters(), lr=0.1), pairs_in(folder)
    for step in range(STEPS):
        numbers = in_passes(Mix((len(every),)), step, PER_STEP, seed="pairs 0")
        loss = _loss(job, model, frozen, [every[number] for number in numbers])
        assert seen[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("job", RESUMED)
def test_a_run_that_was_stopped_goes_on(job: str, runs: dict[str, Path]) -> None:
    resumed, whole = (jobs.lines(f"{runs[job]}{more}") for more in ("-resumed", ""))
    assert [each["loss"] for each in resumed] == pytest.approx([each["loss"] for each in whole], rel=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
@pytest.mark.parametrize("job", KINDS)
def test_adapters_load_in_plain_peft(job: str, folder: Path, runs: dict[str, Path]) -> None:
    """And evaluate there as they did at the run's end, on the pairs that were held out."""
    from peft import PeftModel

    auto: Any = AutoModelForSequenceClassification if job == "reward" else AutoModelForCausalLM
    more = {"num_labels": 1} if job == "reward" else {}
    out = Path(f"{runs[job]}-lora")
    adapted = PeftModel.from_pretrained(auto.from_pretrained(folder / "base", **more), str(out / "adapter"))
    seen, every = jobs.lines(out), pairs_in(folder)
    if job == "dpo":  # at the start the reference is the model
        assert seen[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    (path,) = (out / "data").glob("*.npz")
    _, held = split_samples(TokenizedDataset.load(path), 0.2, seed=0, pairs=True)
    numbers = held.indices.reshape(-1, 2)
    assert (numbers[:, 0] % 2 == 0).all()
    assert (numbers[:, 1] == numbers[:, 0] + 1).all()
    frozen = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        want = _loss(job, adapted, frozen, [every[number // 2] for number in numbers[:, 0].tolist()])
    assert seen[-1]["eval_loss"] == pytest.approx(want.item(), rel=1e-5)


def _as_before(rank: int, world: int, options: RewardOptions) -> None:
    """A run of a version whose checkpoints had a digest of the score below its adapters too."""
    with mock.patch("odc_triton.checkpoint.base_model.frozen_base", partial(frozen_base, as_before=True)):
        assert jobs.train(rank, world, [options], stop_after=1) == [jobs.STOPPED]


@pytest.mark.filterwarnings("ignore:.* has 1 tensors that the model does not have")  # a head
def test_adapters_of_a_reward_model_are_exported(folder: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    """The score below them has random values, which no file has, in the run and in `export`."""
    run = Path(f"{runs['reward']}-lora")
    assert main(["export", str(run), "--out", str(tmp_path / "new"), "--dtype", "fp32"]) == 0
    name = "adapter_model.safetensors"
    got, want = (load_file(each / name) for each in (tmp_path / "new", run / "adapter"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[each], want[each]) for each in want)
    before: Any = options(folder, "reward", out=str(tmp_path / "before"), lora_rank=2, seed=3)
    ranks.run(_as_before, 1, before)
    assert main(["export", before.out, "--out", str(tmp_path / "old"), "--merge"]) == 0
    assert jobs.run(1, replace(before, resume="auto")) == [jobs.ENDED]


def test_a_pair_is_cut_or_left_out_as_one(folder: Path) -> None:
    """Both texts fit in a microbatch; equal texts have nothing to learn."""
    encoder = TextEncoder.of(load_tokenizer(folder / "tokenizer.json"))
    rows = [("a", "long " * 40, "b"), ("a", "b", "c"), ("a", "same", "same"), ("a", "x " * 30, "y " * 30)]
    table = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    for too_long, counts in (("truncate", (6, 0, 2)), ("drop", (2, 4, 2))):
        path, source = folder / f"{too_long}.npz", PairSource(RecordRows(table, "rows"))
        wanted = DataOptions(max_tokens=50, too_long=too_long, pairs=True)  # pyright: ignore[reportArgumentType]
        made = tokenize_source(source, encoder, path, wanted)
        assert (made.samples, made.dropped_too_long, made.dropped_no_target) == counts
        left, long, same = (each // 2 for each in counts)
        assert made.in_words(pairs=True).startswith(f"{left} pairs of 4 records, ")
        assert made.in_words(pairs=True).endswith(f" {long} dropped as too long, {same} dropped with nothing to learn")
        assert (TokenizedDataset.load(path).lengths.reshape(-1, 2).sum(1) <= 50).all()


def test_a_reward_model_is_scored_where_transformers_scores_it(folder: Path) -> None:
    """Its padding may be what ends texts."""
    data: Any = [{"input_ids": torch.tensor(ids).numpy()} for ids in ([5, 6, 7], [5, 6, 0], [0, 0, 8], [5])]
    rows = _Scored(data, 0)
    assert [row["input_ids"].tolist() for row in rows] == [[5, 6, 7, 0], [5, 6, 0], [0, 0, 8, 0], [5, 0]]
    config = AutoConfig.from_pretrained(folder / "config.json", num_labels=1, pad_token_id=0)
    model: Any = AutoModelForSequenceClassification.from_config(config).eval()
    for given, row in zip(data, rows, strict=True):
        hidden = model.model(torch.from_numpy(row["input_ids"])[None]).last_hidden_state
        scored = model(torch.from_numpy(given["input_ids"])[None]).logits[0]
        torch.testing.assert_close(scored, model.score(hidden)[0, -2])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT
def test_texts_that_end_with_padding_are_scored_as_in_training(folder: Path, tmp_path: Path) -> None:
    """Neither the base's config nor its tokenizer has a padding token, as those of GPT-2."""
    from peft import LoraConfig, get_peft_model

    tokenizer = to_transformers(load_tokenizer(folder / "tokenizer.json"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    model = meta_causal_lm(model=folder / "base", scores=True)
    name_special_tokens(model, tokenizer)  # as runs and `export` do
    assert model.config.pad_token_id == tokenizer.eos_token_id
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path))
    (tmp_path / "README.md").unlink()  # of PEFT
    write_card(tmp_path, {"job": "reward", "data": "pairs.jsonl", "model": "base"}, [])
    code = (tmp_path / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    exec(code.replace('folder = "."', f"folder = {str(tmp_path)!r}"), found)
    model.config.pad_token_id = None
    with torch.no_grad():
        for text, score in zip(found["texts"], found["scores"], strict=True):
            ids = tokenizer(text, return_tensors="pt").input_ids
            assert ids[0, -1] == tokenizer.eos_token_id
            assert score == pytest.approx(adapted(input_ids=ids[:, :-1]).logits.item(), rel=1e-5)


def test_the_targets_of_all_data_are_counted_once_a_step() -> None:
    counts = mock.PropertyMock(return_value=np.arange(8))
    run = mock.Mock(data=type("Data", (), {"target_counts": counts})(), mix=Mix((4,)), per_step=6)
    run.state.step = run.options.seed = 0
    run._samples.return_value, run._objective.return_value.means.return_value = [*range(8)], {}
    PairRun.train_step(run)
    pairs = in_passes(run.mix, 0, 6, seed="pairs 0")
    assert run.stepped.call_args.args[1] == sum(4 * pair + 1 for pair in pairs)
    counts.assert_called_once()


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_a_fused_head_stays_fused_in_evaluation(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(model=kind.from_config(AutoConfig.from_pretrained(folder / "config.json")), per_step=2)
    run._samples.return_value, run._objective.return_value.means.return_value = [*range(4)], {}
    seen: list[set[str]] = []

    def training(model: nn.Module, *_: Any, **how: Any) -> mock.Mock:
        seen.append({name for name, each in model.named_modules() if each.training})
        return mock.Mock()

    monkeypatch.setattr("odc_triton.jobs.train.pairs_run.evaluate", training)
    PairRun.evaluate(run)
    assert seen == [{"lm_head"} if kind is AutoModelForCausalLM else set()]
    assert all(each.training for each in run.model.modules())


@pytest.mark.parametrize("job", ["dpo", *map(slow, ["orpo", "reward"])])
def test_a_step_across_two_passes_may_have_a_pair_twice(job: str, folder: Path) -> None:
    changes = {"pairs_per_rank": 30, "steps": 3, "token_cap": 4000, "out": str(folder / "out" / f"{job}-twice")}
    wanted = options(folder, job, **changes)
    assert jobs.run(1, wanted) == [jobs.ENDED]
    assert len(jobs.lines(wanted.out)) == 3


WRONG = [
    (["--data", "alone.jsonl"], "has no 'chosen' and no 'rejected'"),
    (["--split-sequences"], "--split-sequences is True, and train dpo has none"),
    (["--teacher", "base"], "--teacher is base, and train dpo has none"),
    (["--beta", "0"], "--beta is 0.0; it must be positive and finite"),
    (["--pairs-per-rank", "1000"], "an epoch has 35 pairs and one step takes 1000 on each of 1 ranks"),
    (["--token-cap", "20"], "raise --token-cap, or give --truncate or --drop-long"),
    (["--token-cap", "130"], "tokens, more than the cap of 65, half of that of a pair, 130; raise --token-cap"),
]


@pytest.mark.parametrize("job", KINDS)
def test_help_has_no_option_that_pairs_refuse(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", job, "--help"])
    printed = capsys.readouterr().out
    assert "--pairs-per-rank" in printed
    assert not re.findall(r"^ +--(?:no-)?(?:teacher|split)\S*|^Distillation", printed, re.MULTILINE)


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_inputs(
    words: list[str], said: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "alone.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    command = ["train", "dpo", "--data", "pairs.jsonl", "--model", "base", "--tokenizer", "tokenizer.json"]
    words = [*(command if "--data" not in words else [*command[:2], *command[4:]]), *words]
    try:
        status = main([*words, "--out", "refused", "--ranks", "1"])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert said in capfd.readouterr().err
