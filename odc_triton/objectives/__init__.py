"""Losses, and the step that trains by one. The public names, nothing else.

from odc_triton.objectives import CrossEntropy, run_step

for packs in sampler:
    report = run_step(model, packs, CrossEntropy(), collate=lambda pack: pack_collate([dataset[pack]])[0])
    optimizer.step()
    optimizer.zero_grad()
"""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
