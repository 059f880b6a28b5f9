"""torch's tests run with their own assertions: `adapt` leaves these as they are, and refuses what changes one."""

import pytest

from tests.torch_fsdp2.replacements import adapt, check

PLAIN = """
import torch

def test(self, model, optim):
    x = torch.ones(2, device="cuda")
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optim.step()
    self.assertEqual(x.device,
        torch.device("cuda"))
"""
ADAPTED = """
import torch
globals().update(NAMES)

def test(self, model, optim):
    x = torch.ones(2, device="cpu")
    for _ in range(2):
        begin(model)
        loss = model(x).sum()
        loss.backward()
        end(model)
        optim.step()
    self.assertEqual(x.device,
        torch.device("cuda"))
"""


def test_a_step_is_a_minibatch_on_the_cpu_and_assertions_stay():
    assert adapt(PLAIN, "ours") == ADAPTED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.assertEqual(x.device,", "self.assertEqual(x,"),
        ('torch.device("cuda")', 'torch.device("cpu")'),  # in the second line of an assertion
        ('    self.assertEqual(x.device,\n        torch.device("cuda"))\n', ""),
        ("optim.step()", "assert optim.step()"),
    ],
)
def test_a_changed_assertion_is_refused(old, new):
    assert old in ADAPTED
    with pytest.raises(ValueError, match="changed the assertion"):
        check(PLAIN, ADAPTED.replace(old, new))
