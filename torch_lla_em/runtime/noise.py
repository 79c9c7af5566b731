"""Standard normal noise as a pure function of (seed, stream, sample, row, entry).

The generator is counter-based and has no state, so that draws do not depend on chunks, batch sizes,
devices or the number of processes, and any part of them can be drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch
from torch import Tensor

from torch_lla_em.runtime.memory import NUMBERS

# the numbers of SplitMix64, as signed ones
_GOLDEN = -0x61C8864680B583EB
_MULTIPLIERS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def normals(seed: int, stream: int, samples: Sequence[int], rows: Tensor, entries: int) -> Tensor:
    """Return float64 noise of several samples, shape (samples, rows, entries)."""
    signed = (seed + 2**63) % 2**64 - 2**63
    key = _split_mix(torch.tensor([signed], device="cpu") + _GOLDEN)
    key = _split_mix(key + stream + _GOLDEN) + _GOLDEN
    keys = _split_mix(torch.tensor(samples, dtype=torch.long, device="cpu") + key)
    keys = keys.to(rows.device, non_blocking=True)[:, None]
    row_keys = _split_mix(_split_mix(rows.long() * _GOLDEN + keys)).view(-1, 1)
    counters = torch.arange((entries + 1) // 2, device=rows.device) * _GOLDEN
    per_chunk = max(1, NUMBERS // max(1, len(row_keys)))
    pieces = []
    for some in counters.split(per_chunk):  # Box and Muller's method makes two numbers of each
        bits = _split_mix(row_keys + some)
        radius = (((bits & 0xFFFFFFFF).double() + 0.5) * 2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = ((bits >> 32 & 0xFFFFFFFF).double() + 0.5).mul_(2.0**-31 * pi)
        pairs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        pieces.append(pairs.flatten(1))
    noise = torch.cat(pieces, dim=1)[:, :entries]
    return noise.view(len(samples), len(rows), entries)


def _split_mix(x: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 of int64 numbers, whose products wrap around."""
    for by, factor in zip((30, 27), _MULTIPLIERS, strict=True):  # torch's own shift keeps the sign
        x = (x ^ (x >> by & 2 ** (64 - by) - 1)) * factor
    return x ^ (x >> 31 & 2**33 - 1)
