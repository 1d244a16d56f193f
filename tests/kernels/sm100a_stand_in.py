"""A stand-in in torch for fastvideo-kernel's sm_100a module, for the CPU.

It keeps to what the package documents: padded [B, H, S, D], lists of blocks with a count for every query block, valid
slots of every key block, empty lists give zeros. It is as careless as a kernel may be: it multiplies the values of
masked slots by zero, and leaves NaN in query slots past a block's size.
"""

from types import SimpleNamespace

import torch


class FakeKernel:
    """What the package's module offers, with a record of the calls."""

    def __init__(self):
        self.calls = []
        self.asked = []
        self.supported = True
        self.attend = masked_attention

    def is_supported(self, q, variable_block_sizes):
        self.asked.append((q, variable_block_sizes))
        return self.supported

    def block_sparse_attn_sm100a(self, q, k, v, q2k_idx, q2k_num, variable_block_sizes, need_lse=True):
        self.calls.append(SimpleNamespace(q=q, k=k, v=v, index=q2k_idx, count=q2k_num, sizes=variable_block_sizes))
        assert need_lse is False
        assert all(x.is_contiguous() and x.shape == q.shape and x.dtype == q.dtype for x in (q, k, v))
        assert all(x.is_contiguous() and x.dtype == torch.int32 for x in (q2k_idx, q2k_num, variable_block_sizes))
        blocks = variable_block_sizes.numel()
        assert blocks % 2 == 0 and q.shape[2] == 64 * blocks and q.shape[3] == 128
        assert q2k_idx.shape == (*q.shape[:2], blocks, q2k_idx.shape[-1]) and q2k_num.shape == q2k_idx.shape[:3]
        return self.attend(q, k, v, q2k_idx, q2k_num, variable_block_sizes), None


def masked_attention(q, k, v, index, count, sizes):
    out = torch.full_like(q, float("nan"))
    for h in range(q.shape[1]):
        for i, size in enumerate(sizes.tolist()):
            rows = slice(64 * i, 64 * i + size)
            listed = index[0, h, i, : count[0, h, i]].long()
            if len(listed) == 0:
                out[0, h, 64 * i : 64 * (i + 1)] = 0
                continue
            slots = (listed[:, None] * 64 + torch.arange(64)).flatten()
            masked = (torch.arange(64) >= sizes[listed][:, None]).flatten()
            logits = q[0, h, rows].float() @ k[0, h, slots].float().T / 128**0.5
            weights = logits.masked_fill(masked, float("-inf")).softmax(-1)
            out[0, h, rows] = (weights @ v[0, h, slots].float()).to(q.dtype)
    return out


def counts_of_even_rows(q, k, v, index, count, sizes):
    """The fault that once gave silent wrong values: both blocks of a pair use the first one's count."""
    return masked_attention(q, k, v, index, count[..., ::2].repeat_interleave(2, -1), sizes)
