"""The benchmark of ODCGRPOTrainer's shared prompts runs: updates of a smaller model, on two ranks."""

from __future__ import annotations

import sys

import pytest

from tests.support import ranks


def _measured(rank: int, world: int) -> tuple:
    from bench.suites import prefixes_trainer

    prefixes_trainer.LONG_CONFIG |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
    return prefixes_trainer.measure(40, 8, 1, updates=2)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")
def test_runs() -> None:
    for update_s, log_probs_s, disturbed in ranks.run(_measured, 2):
        for seconds in (update_s, log_probs_s):
            assert list(seconds) == ["shared", "dense", "dense, 8,192 tokens"]
            assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())
        assert 0 <= disturbed <= 12
