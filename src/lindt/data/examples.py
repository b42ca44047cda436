"""A client's samples: rows of arrays that all clients share, so that nothing is copied per client.

Legend: n samples, B a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import Tensor

from lindt.errors import UserError
from lindt.protocols import Batch, Digest, Examples


@final
@dataclass(frozen=True)
class Rows:
    """Some rows of shared tensors x and y. `prepare` runs on a batch of x (uint8 to normalised floats, say).

    x may be a view, such as all windows of a text over one buffer; classes in y may be kept as bytes, too.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    prepare: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows_B: Tensor) -> Batch:
        chosen = self.rows.index_select(0, rows_B)  # it copies whole rows: ten times as fast as x[rows]
        x = self.x.index_select(0, chosen)
        return (self.prepare(x) if self.prepare else x), _classes(self.y.index_select(0, chosen))

    @property
    def labels(self) -> Tensor:
        return _classes(self.y[self.rows])


@final
@dataclass(frozen=True)
class Listed:
    """Any map-style dataset of (x, y) pairs, as PyTorch's DataLoader takes it."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows_B: Tensor) -> Batch:
        pairs = [self.dataset[int(row)] for row in rows_B]
        return torch.stack([torch.as_tensor(x) for x, _ in pairs]), _as_labels([y for _, y in pairs])

    @cached_property  # reading them means reading every sample
    def labels(self) -> Tensor:
        return _as_labels([self.dataset[row][1] for row in range(len(self))])


def _as_labels(values: list[Any]) -> Tensor:
    return _classes(torch.stack([torch.as_tensor(value) for value in values]))


def _classes(y: Tensor) -> Tensor:
    """Classes as int64, as losses want them; a regression's targets stay floats."""
    return y if y.is_floating_point() else y.long()


def subset(examples: Examples, rows: Tensor) -> Examples:
    """Some of a client's samples."""
    if isinstance(examples, Rows):
        return Rows(examples.x, examples.y, examples.rows[rows], examples.prepare)
    return _Chosen(examples, rows)


def split(samples: Examples, chosen: Tensor) -> tuple[Examples, Examples]:
    """The other samples, and those that a mask chooses, each in their order."""
    return subset(samples, (~chosen).nonzero().flatten()), subset(samples, chosen.nonzero().flatten())


def stratified(labels: Tensor, wanted: int, seed: int) -> Tensor:
    """A mask of `wanted` samples, drawn so that each class has its share among them, within one sample.

    Each sample is drawn with the same probability: every k-th one, from a random start, of the samples in the order of
    their labels. A plain draw would hold out most of a small class now and then. What is left has too few of just the
    classes that V_i has too many of, so that P_i would look worse on V_i than it is. Targets that have no
    order are drawn at random.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    if labels.dim() == 1:
        order = order[labels[order].argsort(stable=True)]
    start = float(torch.rand((), generator=generator, dtype=torch.float64))
    places = ((torch.arange(wanted, dtype=torch.float64) + start) * len(labels) / wanted).long()
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order[places]] = True
    return mask


@final
@dataclass(frozen=True)
class _Chosen:
    examples: Examples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows_B: Tensor) -> Batch:
        return self.examples.take(self.rows[rows_B])

    @property
    def labels(self) -> Tensor:
        return self.examples.labels[self.rows]


@final
@dataclass(frozen=True)
class Pooled:
    """The samples of several clients as one: the union of D_i."""

    parts: tuple[Examples, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def take(self, rows_B: Tensor) -> Batch:
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(0)
        owner = torch.searchsorted(ends, rows_B, right=True)
        pieces: list[Batch] = []
        places: list[Tensor] = []
        for index in owner.unique().tolist():
            here = (owner == index).nonzero().flatten()
            start = int(ends[index - 1]) if index else 0
            pieces.append(self.parts[index].take(rows_B[here] - start))
            places.append(here)
        back = torch.cat(places).argsort()
        return torch.cat([x for x, _ in pieces])[back], torch.cat([y for _, y in pieces])[back]

    @property
    def labels(self) -> Tensor:
        return torch.cat([part.labels for part in self.parts])


def pool(parts: list[Examples]) -> Examples:
    """The union of several clients' samples; without a copy where they are rows of the same arrays."""
    first = parts[0]
    rows = [part for part in parts if isinstance(part, Rows)]
    if isinstance(first, Rows) and len(rows) == len(parts) and all(_alike(first, part) for part in rows):
        return Rows(first.x, first.y, torch.cat([part.rows for part in rows]), first.prepare)
    return Pooled(tuple(parts))


def _alike(one: Rows, other: Rows) -> bool:
    return one.x is other.x and one.y is other.y and one.prepare == other.prepare


def as_examples(samples: object) -> Examples:
    """What people have: a pair of tensors or arrays, a map-style dataset, or Examples."""
    if hasattr(samples, "take") and hasattr(samples, "labels"):
        return samples  # type: ignore[return-value]  # checked by its two methods
    if isinstance(samples, tuple | list) and len(samples) == 2 and all(hasattr(part, "shape") for part in samples):
        x, y = (torch.as_tensor(part) for part in samples)
        if not isinstance(samples[0], Tensor) and x.dtype == torch.float64:
            x = x.float()  # numpy's default; models have float32
        y = _classes(y)
        if len(x) != len(y):
            raise UserError(f"a client's data: {len(x)} samples but {len(y)} labels; give one label a sample")
        return Rows(x, y, torch.arange(len(x)))
    if isinstance(samples, Sized) and hasattr(samples, "__getitem__"):
        return Listed(samples)
    raise UserError(
        f"a client's data is a {type(samples).__name__}; give a pair (x, y) of tensors or arrays, "
        "or a map-style dataset of (x, y) pairs"
    )


def add_samples(digest: Digest, data: Examples) -> None:
    """The content of a client's samples, for a hash of what was learned from."""
    for rows in torch.arange(len(data)).split(1024):
        for tensor in data.take(rows):
            digest.update(str((tensor.shape, tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())


def sample_hashes(data: Examples, rows: Tensor | None = None, *, labels: bool) -> Iterator[int]:
    """A hash of each sample, of x alone or with its label: equal samples have equal ones, within this process.

    Python's own hash of 64 bits, twice as fast as a cryptographic one. It cannot see samples that are changed
    when read.
    """
    for chunk in (torch.arange(len(data)) if rows is None else rows).split(64):
        x_B, y_B = (tensor.detach().cpu().contiguous().reshape(len(chunk), -1) for tensor in data.take(chunk))
        for x, y in zip(x_B.view(torch.uint8).numpy(), y_B.view(torch.uint8).numpy(), strict=True):
            yield hash(x.tobytes() + y.tobytes() if labels else x.tobytes())


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
