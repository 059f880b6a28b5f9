"""Packs against plain transformers run on each document alone, for tiny random models in fp32."""

import copy
from itertools import accumulate, pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odc_triton import hf
from odc_triton.packs.document_attention import AttentionTerms
from tests.support.families import causal_lm
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.varlen import Varlen
from tests.support.versions import since

TOLERANCE = 1e-4  # fp32 sums over the same terms in another order
LENGTHS = (9, 1, 14)  # the sliding windows are shorter than the first and the last document
PARTS = [slice(*bounds) for bounds in pairwise(accumulate(LENGTHS, initial=0))]
MODELS = ("Qwen2", "Qwen2, windows", "Mistral", "Gemma2", "Gemma3", "GPT2", "Phi3", "Qwen2Moe", "GptOss", "DeepseekV3")
INDEXED = pytest.param("HYV4", marks=since("5.20", "indexers are not told of documents"))


def build(name: str, **changes: object) -> torch.nn.Module:
    """On plain attention, in evaluation mode; weights are large enough for attention and routing to matter."""
    torch.manual_seed(0)
    if name == "Gemma2":
        changes["attn_logit_softcapping"] = 0.05  # so low that dropping the cap would show
    return causal_lm(name, spread=0.2, **changes).eval()


def make_pack(lengths=LENGTHS, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        labels[0, start : start + (length + 1) // 2] = -100  # the first half is the prompt
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": labels,
    }


@pytest.mark.parametrize("name", [*MODELS, INDEXED])
def test_pack_equals_each_document_alone(name):
    alone = build(name)
    packed = copy.deepcopy(alone)
    hf.enable_packing(packed)
    pack = make_pack()
    weight = torch.randn(sum(LENGTHS), 97, generator=torch.Generator().manual_seed(2))

    logits = packed(**hf.model_inputs(pack) | {"use_cache": True}).logits[0]
    (logits * weight).sum().backward()

    for part in PARTS:
        expected = alone(input_ids=pack["input_ids"][:, part], use_cache=False).logits[0]
        torch.testing.assert_close(logits[part], expected, rtol=1e-4, atol=1e-4)
        (expected * weight[part]).sum().backward()
    assert_same_gradients(gradients_of(packed), gradients_of(alone), TOLERANCE)


@pytest.mark.parametrize("name", ["Mistral", "GPT2"])
def test_cumulative_lengths_replace_restarts(name):
    model = build(name)
    hf.enable_packing(model)
    pack = make_pack()
    expected = model(**hf.model_inputs(pack)).logits
    ends = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 14, "max_length_k": 14}
    assert torch.equal(model(**hf.model_inputs(pack | lengths)).logits, expected)
    # and they are what counts: other boundaries, other logits
    lengths["cu_seq_lens_q"] = torch.tensor([0, 24], dtype=torch.int32)
    assert not torch.allclose(model(**hf.model_inputs(pack | lengths)).logits, expected, atol=1e-2)
    with pytest.raises(ValueError, match=r"must rise from 0 to B \* T = 24, but is \[0, 9\]"):
        model(**hf.model_inputs(pack | {"cu_seq_lens_q": torch.tensor([0, 9], dtype=torch.int32)}))


@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_several_rows_of_packs(name):
    model = build(name)
    hf.enable_packing(model)
    packs = [make_pack(LENGTHS, seed=3), make_pack((4, 20), seed=4)]
    rows = {key: torch.cat([pack[key] for pack in packs]) for key in packs[0]}
    logits = model(**hf.model_inputs(rows)).logits
    for row, pack in enumerate(packs):
        alone = model(**hf.model_inputs(pack)).logits[0]
        torch.testing.assert_close(logits[row], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen2", "Mistral", "GptOss", INDEXED])
def test_plain_and_padded_batches(name):
    plain = build(name)
    model = copy.deepcopy(plain)
    hf.enable_packing(model)
    ids = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    for side in ("right", "left"):
        real = torch.arange(12)[None] < torch.tensor([[12], [7], [1]])
        mask = (real if side == "right" else real.flip(1)).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate() makes them
        for inputs in ({}, {"position_ids": positions}):
            inputs = inputs | {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            logits, expected = model(**inputs).logits, plain(**inputs).logits
            torch.testing.assert_close(logits[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2", INDEXED])
def test_a_mask_that_joins_documents_is_refused(name):
    model = build(name)
    hf.enable_packing(model)
    inputs = hf.model_inputs(make_pack())
    expected = model(**inputs).logits
    mask = torch.ones(1, sum(LENGTHS), dtype=torch.long)
    if name == "Qwen2":  # says nothing: still a pack
        assert torch.equal(model(**inputs, attention_mask=mask).logits, expected)
        mask[:, -1] = 0
    with pytest.raises(ValueError, match=r"see one another\. Leave attention_mask out"):
        model(**inputs, attention_mask=mask)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    blocks = (documents[:, None] == documents[None]).tril()[None, None]  # the caller's own: honoured
    torch.testing.assert_close(model(**inputs, attention_mask=blocks).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2", "Gemma3", "GptOss", "DeepseekV3", INDEXED])
def test_generate_is_unchanged(name):
    model = build(name)
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(6))
    ids[0, :3] = 0
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    before = model.generate(ids, **options)
    hf.enable_packing(model)
    after = model.generate(ids, **options)
    assert torch.equal(after.sequences, before.sequences)
    torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), rtol=1e-4, atol=1e-4)


def test_enable_packing_leaves_modes_and_random_state_alone():
    model = build("Qwen2").train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    model.lm_head.register_forward_pre_hook(lambda module, args: torch.rand(1) and None)  # draws in eval mode
    state = torch.get_rng_state()
    hf.enable_packing(model)
    hf.enable_packing(model)  # again: no harm
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == "odc_packed"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_is_honoured(softcap):
    """With equal scores and values of one, an output counts the weights kept: doubled, of 1 / length each."""
    module = torch.nn.Module()
    q = torch.zeros(1, 1, 8, 4)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    options = {"position_ids": positions, "dropout": 0.5, "softcap": softcap}
    torch.manual_seed(0)
    value = torch.ones_like(q)
    outputs = torch.stack(
        [hf.packed_attention(module, q, q, value, None, **options)[0][0, :, 0, 0] for _ in range(200)]
    )
    count = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])
    kept = outputs * count / 2
    torch.testing.assert_close(kept, kept.round())
    assert set(kept[:, 3].round().int().tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("options", [{"softcap": 0.5}, {"s_aux": torch.tensor([1.0, -1.0])}])
def test_queries_of_an_unfilled_static_cache_see_only_what_is_before_them(options):
    module = torch.nn.Module()
    q, kv = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    filled = kv[:, :, :3]
    expected, _ = hf.packed_attention(module, q, filled, filled, None, position_ids=torch.arange(3)[None], **options)
    actual, _ = hf.packed_attention(module, q, kv, kv, None, position_ids=torch.arange(3)[None], **options)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["Qwen2", "Mistral"])
@pytest.mark.parametrize("enable_gqa", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_the_varlen_kernel_is_called_with(name, enable_gqa, rows, monkeypatch):
    """A brute-force kernel of the documented meaning in its place gives what SDPA per document gives."""
    from torch.nn.attention import varlen

    kernel = Varlen()
    model = build(name)
    hf.enable_packing(model)
    pack = {key: value.expand(rows, -1) for key, value in make_pack().items()}
    plain = pack | {"position_ids": torch.arange(sum(LENGTHS))[None]}
    expected = [model(**hf.model_inputs(inputs)).logits for inputs in (pack, plain)]
    monkeypatch.setattr(varlen, "varlen_attn", kernel if enable_gqa else kernel.of_an_older_torch)
    monkeypatch.setattr(AttentionTerms, "fit_kernel", lambda *args: True)
    for inputs, logits in zip((pack, plain), expected, strict=True):
        torch.testing.assert_close(model(**hf.model_inputs(inputs)).logits, logits, rtol=1e-4, atol=1e-4)
    assert kernel.groups == {2}  # nothing repeats keys
    window = (5, 0) if name == "Mistral" else (-1, 0)
    # a batch of whole rows needs the kernel only for its windows
    assert kernel.calls == [(14, window)] * 2 + ([(24, window)] * 2 if name == "Mistral" else [])


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    elements = 0

    def count(self, tensor):
        return tensor.numel()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *map(self.count, tensors)])
        return result


@pytest.mark.parametrize("name", ["Qwen2", "Mistral", "Gemma2"])
def test_no_tensor_grows_with_the_square_of_the_pack(name):
    def largest(model):
        with LargestTensor() as seen:
            hf.summed_loss(model, pack).backward()
        return seen.elements

    tokens, pack = 512, make_pack((64,) * 8)
    plain = build(name, max_position_embeddings=tokens)
    packed = copy.deepcopy(plain)
    hf.enable_packing(packed)
    assert largest(plain) >= tokens**2  # the library's mask: this can fail
    assert largest(packed) < tokens**2 / 4


@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Gemma2"])
@pytest.mark.parametrize("keeps_logits", [True, False])
def test_summed_loss_is_the_librarys_times_the_targets(name, keeps_logits, monkeypatch):
    plain = build(name)
    model = copy.deepcopy(plain)
    hf.enable_packing(model)
    if not keeps_logits:
        forward = model.forward

        def without(input_ids, position_ids, use_cache):
            return forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

        monkeypatch.setattr(model, "forward", without)
    pack = make_pack()
    hf.summed_loss(model, pack).backward()
    total = 0.0
    for part in PARTS:
        labels = pack["labels"][:, part]
        if (targets := (labels != -100).sum()) > 0:
            loss = plain(input_ids=pack["input_ids"][:, part], labels=labels, use_cache=False).loss * targets
            loss.backward()
            total += loss.item()
    assert hf.summed_loss(model, pack).item() == pytest.approx(total, rel=1e-5)
    assert_same_gradients(gradients_of(model), gradients_of(plain), TOLERANCE)


def test_summed_loss_projects_targets_only_and_may_have_none():
    model = build("Qwen2").to(torch.bfloat16)
    hf.enable_packing(model)
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    pack = make_pack()
    loss = hf.summed_loss(model, pack)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert rows == [(pack["labels"] != -100).sum()]
    none = hf.summed_loss(model, dict(pack, labels=torch.full_like(pack["labels"], -100)))
    none.backward()
    assert none.item() == 0.0
    assert all(not parameter.grad.any() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"labels are \[2, 24\]"):
        hf.summed_loss(model, {key: value.expand(2, -1) for key, value in pack.items()})


def test_a_routers_loss_is_refused():
    """`summed_loss` would leave it out, unless it weighs nothing or the family has none."""
    pack = make_pack()
    for name in ("Mixtral", "DeepseekV3"):
        model = build(name)
        hf.enable_packing(model)
        want = hf.summed_loss(model, pack)
        model.config.output_router_logits = True
        if name == "Mixtral":
            with_labels = model(input_ids=pack["input_ids"], labels=pack["input_ids"], use_cache=False)
            assert with_labels.aux_loss > 0  # transformers adds it
            refusal = (
                r"output_router_logits=True, router_aux_loss_coef=0\.001\).*hf\.summed_losses, or set model\.config"
            )
            with pytest.raises(ValueError, match=refusal):
                hf.summed_loss(model, pack)
            model.config.router_aux_loss_coef = 0.0
        assert torch.equal(hf.summed_loss(model, pack), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["Qwen2", "Mistral"])
def test_varlen_kernel_equals_sdpa_per_document(name, monkeypatch):
    model = build(name).to("cuda", torch.bfloat16)
    hf.enable_packing(model)
    pack = {key: value.cuda() for key, value in make_pack().items()}
    hf.summed_loss(model, pack).backward()
    kernel = {key: grad.clone() for key, grad in gradients_of(model).items()}
    model.zero_grad()
    monkeypatch.setattr(AttentionTerms, "fit_kernel", lambda *args: False)
    hf.summed_loss(model, pack).backward()
    for key, grad in gradients_of(model).items():  # bf16 activations round differently in the two kernels
        assert (kernel[key] - grad).norm() <= 5e-2 * grad.norm() + 1e-3, key
