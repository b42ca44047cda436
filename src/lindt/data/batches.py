"""What a client trains on in a round, as batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from lindt.protocols import Batch, Examples

AT_ONCE: Final = 16  # batches that are gathered together


@final
@dataclass(frozen=True)
class LocalWork:
    """What a client trains on in one round, before a threat corrupts it: D_i and E epochs.

    An attacker's batch holds `mixed` samples of `mixed_in` and fills the rest from its own data.
    """

    data: Examples
    epochs: int
    mixed_in: Examples | None = None
    mixed: int = 0
    honest: bool = True  # an attacker trains w only, whatever the method

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One epoch: D_i in random order, in batches of `size`."""
        own = size - self.mixed if self.mixed_in is not None else size
        chunks = list(torch.randperm(len(self.data), generator=generator).split(own))
        if len(chunks) > 1 and len(chunks[-1]) == 1 < own:
            chunks[-2:] = [torch.cat(chunks[-2:])]  # BatchNorm cannot train on a lone last sample
        for start in range(0, len(chunks), AT_ONCE):
            block = chunks[start : start + AT_ONCE]
            batches = _taken(self.data, block)
            if self.mixed_in is None:
                yield from batches
                continue
            theirs = [torch.randint(len(self.mixed_in), (self.mixed,), generator=generator) for _ in block]
            for (x, y), (x_mixed, y_mixed) in zip(batches, _taken(self.mixed_in, theirs), strict=True):
                yield torch.cat([x, x_mixed]), torch.cat([y, y_mixed])


def _taken(data: Examples, chunks: list[Tensor]) -> list[Batch]:
    """Several batches, gathered at once: a small gather costs little more than its call."""
    x, y = data.take(torch.cat(chunks))
    sizes = [len(chunk) for chunk in chunks]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
