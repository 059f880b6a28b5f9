"""Sequence classifiers on packs: scores of any tokens, where transformers' forward returns one of each row."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast


def give_token_scores(model: nn.Module) -> None:
    """Lets a classifier's forward take `logits_to_keep`, positions of whose tokens it returns the scores, [1, n, C].

    Without that, and for other models, nothing changes.
    """
    if isinstance(model, GenericForSequenceClassification) and not gives_token_scores(model):
        model.forward = MethodType(_forward, model)  # the root's own, which gathers its weights


def gives_token_scores(model: nn.Module) -> bool:
    """True for a classifier after `give_token_scores`."""
    return getattr(getattr(model, "forward", None), "__func__", None) is _forward


def every_token(model: nn.Module) -> dict[str, Any]:
    """What asks a model's forward for the logits or scores of all tokens."""
    return {"logits_to_keep": slice(None)} if gives_token_scores(model) else {}


def _forward(self: Any, *args: Any, logits_to_keep: Any = None, **kwargs: Any) -> Any:
    if logits_to_keep is None:
        return type(self).forward(self, *args, **kwargs)
    hidden = self.base_model(*args, **kwargs).last_hidden_state
    return SequenceClassifierOutputWithPast(logits=self.score(hidden[:, logits_to_keep]))
