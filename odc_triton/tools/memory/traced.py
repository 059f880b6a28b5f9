"""Peak memory of a hybrid's microbatch: its modules run on tensors without data. No short formula has their rules."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAME = "odc_traced"  # of SDPA without masks
_CHUNKS, _ROWS = 2, 64  # of a rule's tokens; and twice as many rows, for which the parameters' gradients are small


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that operators have made here, and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given | self._known:
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def traced_bytes_per_token(config: Any, *, itemsize: int, checkpointing: bool, head: bool = True) -> int:
    """Bytes at the peak of a forward and backward, per token, of the decoder of a text config; `head`: with logits and
    loss, else of its blocks alone. In plain torch, as on a CPU: kernels of rules keep less.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(_NAME, AttentionInterface()["sdpa"])
    AttentionMaskInterface.register(_NAME, lambda *given, **options: None)  # which tracing would compute in full
    config, peaks = copy.deepcopy(config), []
    config._attn_implementation = _NAME
    tokens = _CHUNKS * next((n for at in ("chunk_size", "mamba_chunk_size") if (n := getattr(config, at, 0))), 64)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in model.parameters():  # gradients leave at once
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
        for rows in (_ROWS, 2 * _ROWS):
            ids = torch.zeros(rows, tokens, dtype=torch.long)
            with LiveBytes() as live:
                if head:
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                else:
                    model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
            peaks.append(live.most)
    return (peaks[1] - peaks[0]) // (_ROWS * tokens)
