"""Kernel packages of recurrent layers, by stand-ins with their signatures that compute in transformers' torch."""

from __future__ import annotations

import inspect
import sys
from types import MethodType, ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.integrations import hub_kernels
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from odc_triton.plan.cuts import cuts_of
from odc_triton.plan.entries import Segment
from odc_triton.plan.segments import SplitPlan
from odc_triton.recurrent import layers
from odc_triton.recurrent.documents import documents_of
from odc_triton.recurrent.packages import (
    Documents,
    Function,
    Kernel,
    PackageUnsupported,
    convolve,
    delta_rule,
    kernel_of,
    scan,
)
from odc_triton.sequence.exchange import Span
from odc_triton.sequence.layer import RecurrentSplit
from tests.support.devices import OnGpu

kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
decorate = hub_kernels.use_kernel_func_from_hub_with_fallback
FUNCTIONS = (kimi.chunk_kimi_delta_attention, nemotron.mamba2_chunk_scan, nemotron.causal_conv1d_fn)
KDA, SCAN, CONV = (inspect.getclosurevars(function).nonlocals["torch_function"] for function in FUNCTIONS)
T, N, LENGTHS = 9, 3, [3, 1, 5]
DOCUMENTS = Documents.of(LENGTHS, "cpu")
NORM, TERMS = {"use_qk_l2norm_in_kernel": True}, {"chunk_size": 4, "dt_softplus": True}


def own_conv(x, weight, bias, before):
    joined = x if before is None else torch.cat([before, x], 2)
    return CONV(joined, weight, bias, "silu")[..., -x.shape[2] :], weight


OWN = {  # of one document: its initial state is the last argument, it returns the output and the final state
    "rule": lambda *rows: KDA(*rows[:-1], initial_state=rows[-1], output_final_state=True, **NORM),
    "scan": lambda *rows: SCAN(*rows[:-1], initial_states=rows[-1], return_final_states=True, **TERMS),
    "convolution": own_conv,
}
DIMS = {"rule": (1,) * 5, "scan": (1, 1, None, 1, 1), "convolution": (2, None, None)}  # of tokens, None without


def apart(case, rows, starts, lengths):
    starts = [None] * len(lengths) if starts is None else starts.split(1)
    rows = zip(rows, DIMS[case], strict=True)
    parts = ([row] * len(lengths) if dim is None else row.split(lengths, dim) for row, dim in rows)
    outs, finals = zip(*(OWN[case](*part) for part in zip(*parts, starts, strict=True)), strict=True)
    return torch.cat(outs, DIMS[case][0]), torch.cat(finals)


def chunk_kda(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None):  # fmt: skip
    assert initial_state is None or (initial_state.dtype, len(initial_state)) == (torch.float32, len(cu_seqlens) - 1)
    assert [use_qk_l2norm_in_kernel, output_final_state, *cu_seqlens] == [True, True, *cu_seqlens_cpu]
    return apart("rule", (q, k, v, g, beta), initial_state, cu_seqlens.diff().tolist())


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, initial_states=None, seq_idx=None, dt_softplus=False,
                              return_final_states=False):  # fmt: skip
    assert (chunk_size, dt_softplus, initial_states is None or seq_idx is None) == (4, True, True)
    lengths = [x.shape[1]] if seq_idx is None else seq_idx[0].bincount().tolist()
    out, finals = apart("scan", (x, dt, A, B, C), initial_states, lengths)
    return (out, finals[-1:]) if return_final_states else out


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    assert (x.stride(1), x.stride(2), seq_idx.dtype, activation) == (1, 8, torch.int32, "silu")
    return apart("convolution", (x, weight, bias), None, seq_idx[0].bincount().tolist())[0]


def v_first(q, cu_seqlens_cpu=None, state_v_first=True): ...  # fmt: skip


def decorated(patch: pytest.MonkeyPatch, function, module: str, version: str = "9.0"):
    """What a modeling module's function becomes where `function` is installed as `module`'s."""
    patch.setattr(function, "__module__", module)
    for name in (module, package := module.partition(".")[0]):
        patch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update({"__version__": version, function.__name__: function})
    return decorate(function.__name__, package)(KDA)


SSM, RULE = "mamba_ssm.ops.triton.ssd_combined", "fla.ops.kda"
CASES = {
    "rule": (chunk_kda, RULE, [*[(1, T, 2, 4)] * 4, (1, T, 2), (N, 2, 4, 4)]),
    "scan": (mamba_chunk_scan_combined, SSM, [(1, T, 2, 4), (1, T, 2), (2,), (1, T, 1, 8), (1, T, 1, 8), (N, 2, 4, 8)]),
    "convolution": (causal_conv1d_fn, "causal_conv1d", [(1, 8, T), (8, 4), (8,), (N, 8, 3)]),
}


@pytest.mark.parametrize(
    ("case", "from_states"), [("rule", True), ("rule", False), ("scan", True), ("scan", False), ("convolution", False)]
)
def test_documents_equal_calls_of_their_own(case: str, from_states: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, module, shapes = CASES[case]
    waves = [torch.linspace(n, n + 9, torch.Size(s).numel()).sin().reshape(s) for n, s in enumerate(shapes)]
    inputs = [wave.requires_grad_() for wave in waves[: None if from_states else -1]]
    rows, states = inputs[: len(shapes) - 1], inputs[-1] if from_states else None
    kernel = kernel_of(decorated(monkeypatch, function, module))
    kernel = kernel._replace(function=Mock(wraps=kernel.function))
    if case == "convolution":
        x, weight, bias = rows
        got = (convolve(kernel, x, DOCUMENTS, weight=weight, bias=bias, activation="silu"),)
    else:
        call, terms, final = (scan, TERMS, from_states) if case == "scan" else (delta_rule, NORM, True)
        got = call(kernel, *rows, documents=DOCUMENTS, states=states, final=final, **terms)[: 1 + final]
    assert kernel.function.call_count == (N if from_states and case == "scan" else 1)
    want = apart(case, rows, states, LENGTHS)[: len(got)]
    grads = [torch.autograd.grad(sum(tensor.sin().sum() for tensor in side), inputs) for side in (got, want)]
    torch.testing.assert_close([*got, *grads[0]], [*want, *grads[1]], rtol=1e-5, atol=1e-5)


def test_the_first_segment_of_a_split_sample_publishes_its_rows() -> None:
    """It reads none, and others wait for them."""
    first, rest = Segment(0, 0, 5), Segment(0, 5, 9)
    plan = SplitPlan.of([[[first]], [[rest]]])
    (document,) = documents_of([0, 5], [first], plan=plan, cuts=cuts_of(plan))
    side = Mock(layer=0, **{"exchange.of.return_value": plan, "runs.return_value": []})
    side.publish.side_effect = lambda rows, spans, window, own: (*rows, own)
    pack = layers._RecurrentPack(Mock(), [document], RecurrentSplit(side, None), [Span(first, 0, 5)])
    x, weight = torch.arange(40.0).view(1, 8, 5), torch.ones(8, 4)
    function = Function(CONV, Kernel(Mock(), "causal-conv1d 9.0", CONV))
    found = layers._convolution(function, x.as_subclass(OnGpu), weight, None, "silu", odc_pack=pack)
    ((rows,), *_), _ = side.publish.call_args
    assert torch.equal(rows[0, 0].T, x[0, :, 2:])
    torch.testing.assert_close(found.as_subclass(torch.Tensor), CONV(x, weight, None, "silu"))


@pytest.mark.parametrize(
    ("function", "module", "version", "message"),
    [
        (chunk_kda, RULE, "0.4.2", "attention 0.4.2 reads wrong keys.*: install .*attention>=0.5.0, or unin"),
        (v_first, RULE, "0.9.0", r"attention 0.9.0 lays states out as \[V, K\]"),
        (own_conv, RULE, "0.9.0", "has no `cu_seqlens_cpu` in `own_conv`"),
        (own_conv, SSM, "2.2.2", "mamba-ssm 2.2.2 computes wrong gradients"),
        (own_conv, "causal_conv1d", "1.0.2", "causal-conv1d 1.0.2 does not keep documents apart"),
        (own_conv, "elsewhere", "9.0", "`elsewhere.own_conv`, which is unknown"),
    ],
)
def test_refused_by_name(function, module: str, version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackageUnsupported, match=message):
        kernel_of(decorated(monkeypatch, function, module, version))


def test_a_kernel_of_the_hub_is_refused() -> None:
    layer = nn.Identity()
    layer.forward = MethodType(own_conv, layer)
    with pytest.raises(PackageUnsupported, match=r"the Hub's `tests.recurrent.test_packages` replaced it"):
        kernel_of(layer)
    assert kernel_of(decorate("chunk_kda", "not_installed")(KDA)) is None
