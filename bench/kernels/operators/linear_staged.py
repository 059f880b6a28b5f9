"""linear and linear_dx, by the strategy `staged`: copies and kernel in one call, as a layer runs them."""

from __future__ import annotations

import torch

from odc_kernels.linear import linear_dx_ref, linear_ref
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.peers import PeerShards
from odc_kernels.staged import StagedWeight, check, pull

from .linear import product_baselines, product_work
from .operator import CHUNK, Operator, Prepared, Problem, Results


class Pulled:
    """A buffer that every call pulls the weight into again."""

    def __init__(self, peers: PeerShards) -> None:
        self.peers, self.weight = peers, StagedWeight.of(peers)

    def __call__(self) -> StagedWeight:
        if self.weight.on is not None:
            # Otherwise the copies would begin before the clock does.
            self.weight.stream.wait_stream(self.weight.on.current())
        self.weight = pull(peers=self.peers, staged=self.weight)
        return self.weight


def prepare_linear(problem: Problem) -> Prepared:
    whole, x = problem.weight(), problem.tensor(problem.tokens, problem.layer.columns)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.rows)
    pulled = Pulled(peers)

    def results() -> Results:
        out.fill_(torch.nan)
        linear_staged(x=x, weight=pulled(), out=out)
        check(pulled.weight)
        for now, of in zip(out.split(CHUNK), x.split(CHUNK), strict=True):
            yield "y", now, linear_ref(of, [whole], None)

    return Prepared(
        run=lambda: linear_staged(x=x, weight=pulled(), out=out),
        check=results,
        baselines=product_baselines(x, whole, peers, transposed=True),
        work=product_work(problem),
    )


def prepare_linear_dx(problem: Problem) -> Prepared:
    whole, dy = problem.weight(), problem.tensor(problem.tokens, problem.layer.rows)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.columns)
    pulled = Pulled(peers)

    def results() -> Results:
        out.fill_(torch.nan)
        linear_dx_staged(dy=dy, weight=pulled(), out=out)
        check(pulled.weight)
        for now, of in zip(out.split(CHUNK), dy.split(CHUNK), strict=True):
            yield "dx", now, linear_dx_ref(of, [whole])

    return Prepared(
        run=lambda: linear_dx_staged(dy=dy, weight=pulled(), out=out),
        check=results,
        baselines=product_baselines(dy, whole, peers, transposed=False),
        work=product_work(problem),
    )


_FILES = ("staged", "linear_staged")
OPERATORS = (
    Operator(name="linear staged", kernels=_FILES, layers=lambda model: model.layers(), prepare=prepare_linear),
    Operator(name="linear_dx staged", kernels=_FILES, layers=lambda model: model.layers(), prepare=prepare_linear_dx),
)
