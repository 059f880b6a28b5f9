"""Operators on real ranks, backends and choices, beside plain torch in double on all ranks' microbatches."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from odc_triton.nn import Embedding, Linear, LMHead
from odc_triton.nn.functional import embedding, linear, qkv
from odc_triton.nn.functional.experts import grouped_linear
from odc_triton.nn.functional.qkv import HeadNorm
from tests.support import ranks, slow

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
# Of the largest element, or of 1, the size of what is summed. fp32, fp64: sums in another order. bf16: both sides begin
# with the same rounded numbers; what is left are roundings of what is handed on, 2^-9 each: results, projections, and
# through a norm and RoPE up to six on the way back.
TOLERANCE = {FP32: 1e-5, BF16: 3e-2, FP64: 1e-12}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`ours(parameters, *inputs)` runs an operator that `plain` does by torch; `batches`: all ranks' microbatches.

    A function at the end of a microbatch says what is made of its first input before.
    """

    shapes: dict[str, tuple[int, ...]]
    ours: Callable[..., object]
    plain: Callable[..., object]
    batches: list[tuple]
    gathered: bool = False
    frozen: tuple[str, ...] = ()


class Operator(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for name, shape in case.shapes.items():
            value = torch.randn(shape) / max(shape[-1], 1) ** 0.5
            self.register_parameter(name, nn.Parameter(value, requires_grad=name not in case.frozen))

    def reads_on_demand(self, device_type: str, table: tuple = ()) -> tuple[str, ...]:
        return () if self.case.gathered else tuple(name for name in self.case.shapes if not name.endswith("norm"))

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.case.ours(dict(self.named_parameters(recurse=False)), *inputs)


class Operators(nn.Module):
    """A module per case, so that one sharded model serves them all."""

    def __init__(self, cases: dict[str, Case]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Operator(case) for name, case in cases.items()})

    def forward(self, name: str, *inputs: torch.Tensor) -> object:
        return self.layers[name](*inputs)


def _run(compute: Callable[..., object], case: Case, index: int, dtype: torch.dtype, wide: bool) -> tuple:
    """Outputs of a microbatch and its inputs, after a backward with a gradient that is exact in bf16."""
    inputs, view = [], lambda x: x
    for each in case.batches[index]:
        if not isinstance(each, torch.Tensor):
            view = each
            continue
        if each.is_floating_point():
            each = each.detach().to(dtype).to(FP64 if wide else dtype).requires_grad_(each.requires_grad)
        inputs.append(each)
    outputs = compute(view(inputs[0]), *inputs[1:])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    g = torch.Generator().manual_seed(index)
    loss = sum((each * torch.randn(each.shape, generator=g).to(BF16).to(each.dtype)).sum() for each in outputs)
    if loss.requires_grad:
        loss.backward()
    return [each.detach() for each in outputs], inputs


def _near(got: torch.Tensor | None, want: torch.Tensor | None, dtype: torch.dtype, name: str) -> None:
    assert (got is None) == (want is None), name
    if want is None:
        return
    assert got.shape == want.shape, f"{name}: {got.shape}, {want.shape}"
    if want.numel():
        limit = TOLERANCE[dtype] * max(float(want.abs().max()), 1.0)
        worst = float((got.double() - want).abs().max())
        assert worst <= limit, f"{name}: {worst:.2e}, allowed are {limit:.2e}"


def _check(rank: int, world: int, backend: str, dtype: torch.dtype, backends: str, turn: int) -> int:
    """One minibatch of every case; some ranks have more microbatches than others. Returns their number."""
    torch.manual_seed(0)
    cases = _cases(backends, dtype, turn)
    model = Operators(cases).to(FP64 if dtype is FP64 else FP32)
    plain = {
        name: p.detach().to(dtype).to(FP64).requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }
    policy = MixedPrecisionPolicy(param_dtype=BF16 if dtype is BF16 else None)
    model = fully_shard(model, backend=backend, mp_policy=policy)
    with minibatch(model, tokens=1):
        for name, case in cases.items():
            of_case = {key: plain[f"layers.{name}.{key}"] for key in case.shapes}
            for index in range(len(case.batches)):
                wants, want_inputs = _run(lambda *x, p=of_case, c=case: c.plain(p, *x), case, index, dtype, wide=True)
                if (0, 0, 1, 2)[index % 4] % world != rank:
                    continue
                outputs, inputs = _run(lambda *x, n=name: model(n, *x), case, index, dtype, wide=False)
                for got, want in zip(outputs, wants, strict=True):
                    _near(got, want, dtype, f"{name}: output {index}")
                for got, want in zip(inputs, want_inputs, strict=True):
                    _near(got.grad, want.grad, dtype, f"{name}: gradient of input {index}")
    for name, parameter in model.named_parameters():
        want = plain[name].grad
        if want is not None:
            each = -(-len(want) // world)
            want = want[rank * each : (rank + 1) * each]
        got = None if parameter.grad is None else parameter.grad.to_local()
        _near(got, want, dtype, f"gradient of {name}")
    return sum(len(case.batches) for case in cases.values())


def _x(*shape: int, trains: bool = True) -> torch.Tensor:
    return torch.randn(shape, requires_grad=trains)


def _choices(backends: str, sources: str, wgrads: str) -> list[str]:
    return ["/".join(words) for words in itertools.product(backends.split(), sources.split(), wgrads.split())]


def _linears(backends: str) -> dict[str, Case]:
    """Rows fewer than ranks, one row, columns of no tile's multiple; x of all shapes and strides."""
    cases = {}
    for number, choice in enumerate(_choices(backends, "gathered direct staged", "whole fused")):
        for n, k in ((5, 7), (1, 3), (2, 33), (4, 1)):
            shapes = {"weight": (n, k)} | ({"bias": (n,)} if (number + n) % 3 else {})
            batches = [(_x(*shape),) for shape in ((3, k), (0, k), (k,), (2, 1, 2, k))]
            batches += [(_x(3, 2, k), lambda x: x.transpose(0, 1)), (_x(1, k), lambda x: x.expand(4, -1))]
            batches += [(_x(k, 5), lambda x: x.T), (_x(3, k, trains=False),)]
            frozen = {2: ("weight",), 1: ("bias",), 4: ("weight", "bias")}.get(n, ()) if number % 2 else ()
            cases[f"{choice}, {n}x{k}"] = Case(
                shapes=shapes,
                ours=lambda p, x, c=choice: linear(x, p["weight"], p.get("bias"), choice=c),
                plain=lambda p, x: F.linear(x, p["weight"], p.get("bias")),
                batches=batches,
                gathered="gathered" in choice or k == 33,  # whole, yet read from the owners
                frozen=frozen,
            )
    return cases


def _embeddings(backends: str) -> dict[str, Case]:
    cases = {}
    for choice in _choices(backends, "gathered direct", "whole fused"):
        for rows, columns, padding in ((7, 5, None), (7, 16, 3), (2, 3, 0), (1, 1, None)):
            ids = [torch.randint(0, rows, shape) for shape in ((9,), (0,), (2, 3), (), (4, 0), (2, 2, 2), (1,), (30,))]
            ids[0] = ids[0].int()
            ids[6] = torch.tensor([padding or 0])
            cases[f"{choice}, {rows}x{columns}"] = Case(
                shapes={"weight": (rows, columns)},
                ours=lambda p, i, c=choice, pad=padding: embedding(i, p["weight"], padding_idx=pad, choice=c),
                plain=lambda p, i, pad=padding: F.embedding(i, p["weight"], pad),
                batches=[(each,) for each in ids],
                gathered="gathered" in choice,
            )
    return cases


def _plain_qkv(p: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos[..., None, :] + torch.cat((-second, first), -1) * sin[..., None, :]

    q, k, v = (F.linear(x, p[f"w{part}"], p.get(f"b{part}")).unflatten(-1, (-1, 16)) for part in "qkv")
    if "q_norm" in p:
        q, k = F.rms_norm(q, (16,), p["q_norm"], 1e-3), F.rms_norm(k, (16,), p["k_norm"], 1e-3)
    return turned(q), turned(k), v


def _our_qkv(p: dict[str, torch.Tensor], *inputs: torch.Tensor, choice: str) -> tuple:
    norm = HeadNorm(q_weight=p["q_norm"], k_weight=p["k_norm"], eps=1e-3) if "q_norm" in p else None
    biases = [p[f"b{part}"] for part in "qkv"] if "bq" in p else None
    x, cos, sin = inputs
    return qkv(x, [p[f"w{part}"] for part in "qkv"], biases, cos, sin, head_dim=16, norm=norm, choice=choice)


def _qkvs(backends: str) -> dict[str, Case]:
    cases = {}
    for number, choice in enumerate(_choices(backends, "gathered direct", "whole fused")):
        for kind in ("plain", "bias", "norm", "frozen"):
            shapes = {"wq": (32, 20), "wk": (16, 20), "wv": (16, 20)}
            if kind != "plain":
                shapes |= {"bq": (32,), "bk": (16,), "bv": (16,)}
            if kind == "norm":
                shapes |= {"q_norm": (16,), "k_norm": (16,)}
            tables = [torch.randn(2, *lead, 8).repeat(*[1] * len(lead), 1, 2) for lead in ((1, 3), (5,), (2, 1), (0,))]
            xs = [_x(2, 3, 20), _x(5, 20), _x(2, 1, 20, trains=kind != "frozen"), _x(0, 20)]
            cases[f"{choice}, {kind}"] = Case(
                shapes=shapes,
                ours=lambda p, *inputs, c=choice: _our_qkv(p, *inputs, choice=c),
                plain=_plain_qkv,
                batches=[(x, *table.unbind()) for x, table in zip(xs, tables, strict=True)],
                gathered="gathered" in choice,
                frozen=(("wq", "bk", "wv"), ("wk", "bq", "bv"))[number % 2] if kind == "frozen" else (),
            )
    return cases


def _plain_experts(p: dict[str, torch.Tensor], x: torch.Tensor, ends: list[int], **how: object) -> torch.Tensor:
    parts, gate = [], how.get("gate")
    for e, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        w = p["weight"][e] if how.get("transposed") else p["weight"][e].T
        parts.append(x[begin:end] @ w + (p["bias"][e] if "bias" in p else 0))
    y = torch.cat(parts)
    if gate is None:
        return y
    if gate[0] == 0:
        return F.silu(y[:, :3]) * y[:, 3:]
    g, u = y[:, ::2].clamp(max=gate[0]), y[:, 1::2].clamp(-gate[0], gate[0])
    return g * torch.sigmoid(gate[1] * g) * (u + 1)


def _experts(backends: str) -> dict[str, Case]:
    """Five experts, of whom some have no rows, or one all, or there are no rows."""
    cases = {}
    hows = ({}, {"transposed": True, "gate": (2.1, 1.7, 1.0)}, {"gate": (0.0, 1.0, 0.0)}, {"transposed": True})
    routes = ([2, 2, 3, 7, 9], [0, 4, 4, 4, 4], [0, 0, 0, 0, 0], [1, 2, 3, 4, 5])
    for number, choice in enumerate(_choices(backends, "gathered direct staged", "whole fused")):
        for kind, how in enumerate(hows):
            biased = (number + kind) % 2 > 0
            shapes = {"weight": (5, 8, 6) if "transposed" in how else (5, 6, 8)} | ({"bias": (5, 6)} if biased else {})

            def ours(p: dict, x: torch.Tensor, ends: torch.Tensor, c: str = choice, how: dict = how) -> torch.Tensor:
                return grouped_linear(x, F.pad(ends, (1, 0)), p["weight"], p.get("bias"), choice=c, **how)

            cases[f"{choice}, {kind}"] = Case(
                shapes=shapes,
                ours=ours,
                plain=lambda p, x, ends, how=how: _plain_experts(p, x, ends.tolist(), **how),
                batches=[(_x(ends[-1], 8), torch.tensor(ends, dtype=torch.int32)) for ends in routes],
                gathered="gathered" in choice,
                frozen=(("weight",), ("bias",), (), ())[(number + kind) % 4],
            )
    return cases


TABLES = {"experts": _experts, "linear": _linears, "embedding": _embeddings, "qkv": _qkvs}


def _cases(backends: str, dtype: torch.dtype, turn: int) -> dict[str, Case]:
    """All tables' cases; of those in the interpreter, which is slow, others each turn."""
    cases = {}
    for table, make in TABLES.items():
        for number, (name, case) in enumerate(make(backends).items()):
            if "triton" in name:
                if (number + number // 4 + turn) % 4:
                    continue
                case = replace(case, batches=case.batches[(number + turn) // 2 % 2 :: 2])
            cases[f"{table}, {name}"] = case
    return cases


BOTH = "eager triton"


@pytest.mark.parametrize(
    ("world", "backend", "backends"),
    [
        (3, "cpu", {FP64: "eager"}),
        slow(3, "cpu", {FP32: BOTH}),
        slow(2, "cpu-sharded", {FP32: BOTH, BF16: "eager"}),
        (3, "cpu-interpreter", {FP32: BOTH}),
        slow(2, "cpu-interpreter", {BF16: BOTH}),
    ],
)
def test_outputs_and_gradients(world: int, backend: str, backends: dict[torch.dtype, str]) -> None:
    turn = ["cpu", "cpu-sharded", "cpu-interpreter"].index(backend)
    for counts in ranks.run_all(world, *((_check, backend, *each, turn) for each in backends.items())):
        assert min(counts) == max(counts) >= 100


KERNELS = ("linear", "linear_dx", "linear_staged", "linear_dx_staged", "wgrad", "embedding", "embedding_grad", "qkv")
KERNELS += ("qkv_grad",)


@pytest.mark.parametrize(
    ("table", "case", "kernels"),
    [
        (_linears, "eager/direct/fused, 5x7", ""),
        (_linears, "triton/gathered/whole, 5x7", ""),
        (_linears, "triton/direct/whole, 5x7", "linear linear_dx"),
        (_linears, "triton/direct/fused, 5x7", "linear linear_dx wgrad"),
        (_linears, "triton/staged/whole, 5x7", "linear_staged linear_dx_staged"),
        (_embeddings, "triton/direct/fused, 7x5", "embedding embedding_grad"),
        (_embeddings, "triton/gathered/whole, 7x5", ""),
        (_qkvs, "eager/direct/fused, plain", ""),
        (_qkvs, "triton/gathered/whole, plain", "qkv qkv_grad"),
    ],
)
def test_which_kernels_run(table: Callable, case: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ran = table("eager triton")[case], set()
    homes = {"linear_dx": "linear", "linear_dx_staged": "linear_staged", "embedding_grad": "embedding"}
    for name in KERNELS:
        home = importlib.import_module(f"odc_kernels.{homes.get(name, name)}")
        own = getattr(home, name)
        monkeypatch.setattr(home, name, lambda own=own, name=name, **given: ran.add(name) or own(**given))
    model = fully_shard(Operator(made), backend="cpu-interpreter")
    with minibatch(model, tokens=1):
        out = model(*made.batches[0])
        (out[0].sum() if isinstance(out, tuple) else out.sum()).backward()
    assert ran == set(kernels.split())


class Net(nn.Module):
    def __init__(self, choice: str) -> None:
        super().__init__()
        self.table, self.layer = Embedding(7, 4, padding_idx=1, choice=choice), Linear(4, 3, choice=choice)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids)).tanh()


def _penalized(model: nn.Module, parameters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    value = model(ids).square().sum()
    return value + sum(g.square().sum() for g in torch.autograd.grad(value, parameters, create_graph=True))


def _second_derivatives(rank: int, world: int, backend: str, choice: str) -> None:
    torch.manual_seed(0)
    model = Net(choice)
    plain = copy.deepcopy(model)
    batches = [torch.tensor([0, 3, 3, 1]), torch.tensor([[6, 1]]), torch.tensor([5])]
    for ids in batches:
        _penalized(plain, list(plain.parameters()), ids).backward()
    model = fully_shard(model, backend=backend)
    with minibatch(model, tokens=1):
        model.unshard()
        for ids in batches[rank::world]:
            _penalized(model, list(model.parameters()), ids).backward()
        model.reshard()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        _near(got.grad.full_tensor(), want.grad, FP32, name)


def _no_second_derivative(which: str) -> None:
    if which == "qkv":
        case = _qkvs("triton")["triton/direct/fused, plain"]
        model, batch = Operator(case), case.batches[0]
    else:
        model, batch = LMHead(5, 7, choice="triton"), (_x(3, 5),)
    model = fully_shard(model, backend="cpu-sharded")
    with minibatch(model, tokens=1):
        out = model(*batch)
        outputs = out if which == "qkv" else [out.log_probs(torch.tensor([0, 6, 3])).logp]
        torch.autograd.grad(sum(each.square().sum() for each in outputs), batch[0], create_graph=True)


@pytest.mark.parametrize(
    ("which", "remedy"),
    [("qkv", "give it choice='qkv=eager'"), ("head", "leave the role 'head' out of replace_layers")],
)
def test_no_second_derivative(which: str, remedy: str) -> None:
    with pytest.raises(RuntimeError, match=f"the fused .* has no second derivative: {remedy}"):
        _no_second_derivative(which)


@pytest.mark.parametrize("choice", ["eager/gathered/whole", "eager/direct/fused"])
def test_a_gradient_of_the_input_alone_trains_no_weight(choice: str) -> None:
    model, x = fully_shard(Linear(4, 3, choice=choice), backend="cpu-sharded"), _x(2, 4)
    with minibatch(model, tokens=1):
        torch.autograd.grad(model(x).sum(), x)
        model(x).sum().backward(inputs=[x])
    assert model.weight.grad is None
    assert model.bias.grad is None


WORDS = {"eager/direct": "the table has rows 0..6", "eager/gathered": "index"}


def _penalties_and_ids(rank: int, world: int) -> None:
    for choice in ("eager/gathered/whole", "eager/direct/fused", "triton/direct/fused"):
        _second_derivatives(rank, world, "cpu-sharded", choice)
    for choice, words in WORDS.items():
        model = fully_shard(Embedding(7, 4, choice=choice), backend="cpu-sharded")
        for number in (7, -1, 2**40):
            with pytest.raises(IndexError, match=words):
                model(torch.tensor([3, number]))


def test_a_penalty_on_gradients_and_ids_out_of_range() -> None:
    ranks.run(_penalties_and_ids, 3)
