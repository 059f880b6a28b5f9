"""One line of the result: one operator on one problem, checked, and timed where there is a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from .operator import Operator, Problem


@dataclass(kw_only=True)
class Cell:
    """`errors`: of every result, its largest difference over the reference's largest number. `fault`: why the check
    did not pass. Of "ours" and of every baseline: `us`, quantiles in microseconds; `ratios`, the baseline's time over
    ours in the same round, median and 95% interval, above 1 where ours is faster; `missing`, why one was not timed.
    """

    operator: str
    model: str
    layer: str
    rows: int
    columns: int
    tokens: int
    world: int
    dtype: str
    peers: str
    passed: bool | None = None
    errors: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    us: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    tflops: float | None = None
    hbm_gb_s: float | None = None
    link_gb_s: float | None = None
    of_roofline: float | None = None
    peak_bytes: int | None = None
    whole_bytes: int = 0

    @classmethod
    def of(cls, operator: Operator, problem: Problem) -> Cell:
        return cls(
            operator=operator.name,
            model=problem.model.name,
            layer=problem.layer.name,
            rows=problem.layer.rows,
            columns=problem.layer.columns,
            tokens=problem.tokens,
            world=problem.world,
            dtype=str(problem.dtype).removeprefix("torch."),
            peers=problem.peers,
        )

    @property
    def name(self) -> str:
        tokens = f", {self.tokens} tokens" if self.tokens else ""
        return f"{self.operator}, {self.model} {self.layer} [{self.rows}, {self.columns}]{tokens}, world {self.world}"
