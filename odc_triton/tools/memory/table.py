"""Plans of memory side by side, as text."""

from __future__ import annotations

from typing import Any

from ...jobs.reports.report import in_columns

_ROWS = (
    ("parameter shard, compute dtype", "compute_shard_bytes"),
    ("parameter shard, master", "master_shard_bytes"),
    ("gradient shard", "gradient_shard_bytes"),
    ("gradient cast to the master's dtype", "gradient_cast_bytes"),
    ("optimizer states", "optimizer_state_bytes"),
    ("split sequences", "split_bytes"),
    ("rows for Muon", "muon_bytes"),
    ("other ranks' experts", "other_experts_bytes"),
    ("buffers", "buffer_bytes"),
    ("checkpoints in the background, host", "checkpoint_host_bytes"),
    ("unsharded parameters, peak", "gathered_bytes"),
    ("unsharded gradients, peak", "transient_gradient_bytes"),
    ("activations (estimate)", "activation_bytes"),
    ("total", "total_bytes"),
    ("of which readable by peers", "shared_bytes"),
    ("whole job, shared memory", "job_shared_bytes"),
)


def side_by_side(*plans: Any) -> str:
    """An aligned text table with one column per MemoryPlan (scheme/backend/world), in GB (10^9 bytes) per rank, in
    MB if no total is 1 GB.
    """
    unit, of = ("GB", 1e9) if max(plan.total_bytes for plan in plans) >= 1e9 else ("MB", 1e6)

    def cell(plan: Any, name: str) -> str:
        if name == "activation_bytes" and plan.activation_bytes_per_token is None:
            return "unknown"
        return f"{getattr(plan, name) / of:.3f}"

    rows = [[f"{unit} per rank", *(plan.title for plan in plans)]]
    optional = ("split_bytes", "muon_bytes", "other_experts_bytes", "checkpoint_host_bytes")
    shown = [row for row in _ROWS if row[1] not in optional or any(getattr(plan, row[1]) for plan in plans)]
    rows += [[label, *(cell(plan, name) for plan in plans)] for label, name in shown]
    return "\n".join(in_columns(rows, numbers=True))
