"""What `torch.nn.attention.varlen.varlen_attn` computes, by its documented meaning, on any device. Keeps its calls."""

from __future__ import annotations

import torch


class Varlen:
    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, int]]] = []  # (longest document's queries, window)
        self.groups: set[int] = set()  # queries' heads per head of keys

    def __call__(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=None, window_size=(-1, -1), enable_gqa=False
    ) -> torch.Tensor:
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
        assert (cu_seq_q[0], cu_seq_q[-1], cu_seq_k[0], cu_seq_k[-1]) == (0, len(query), 0, len(key))
        self.calls.append((max_q, window_size))
        groups = query.shape[1] // key.shape[1]
        assert enable_gqa == (groups > 1)
        self.groups.add(groups)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        documents, back = [], []  # of each query and key: its document, and how far it is from its document's end
        for ends in (cu_seq_q, cu_seq_k):
            token = torch.arange(int(ends[-1]))
            documents.append((token[:, None] >= ends[None, 1:]).sum(1))
            back.append(ends[documents[-1] + 1] - token)
        behind = back[1][None] - back[0][:, None]  # the mask is aligned to the lower right
        left, right = window_size
        allowed = (documents[0][:, None] == documents[1][None]) & (behind >= -right)
        if left >= 0:
            allowed &= behind <= left
        scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -1e9).softmax(-1), value)

    def of_an_older_torch(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
        """Without `enable_gqa`: it takes grouped keys unasked."""
        grouped = query.shape[1] != key.shape[1]
        return self(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, grouped)
