"""Losses, and the step that trains by one. The public names, nothing else.

    class Mine(Objective):
        def loss(self, model, pack, terms):
            logits, targets = predictions(model, pack)
            return my_loss(logits, targets).sum() / terms.number, {}

    for packs in sampler:  # which knows `targets`
        collate = lambda pack: pack_collate([dataset[pack]])[0]
        report = run_step(model, packs, Mine(), collate=collate)
        optimizer.step()
        optimizer.zero_grad()

A sum over tokens works with split samples and shared prefixes as it is; one that couples tokens needs `SampleSums`, as
ORPO's. ODCTrainer's loss is overridden by `compute_loss`; `train` takes none.
"""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
