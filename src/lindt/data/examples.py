"""A client's samples: rows of arrays that all clients share, so that no sample is copied for a client.

Legend: n samples, B a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lindt.data.inputs import (
    STREAM,
    as_array,
    as_batch,
    as_tensor,
    dataset_of,
    has_structure,
    of_columns,
    of_pandas,
    stack_samples,
)
from lindt.errors import UserError, in_short, one_line
from lindt.protocols import Batch, Digest, Examples, tensors_of


@final
@dataclass(frozen=True)
class Rows:
    """Some rows of shared tensors x and y. `prepare` runs on a batch of x, such as uint8 to normalised floats.

    x may be a view, such as all windows of a text over one buffer. Classes in y may be stored as bytes.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    prepare: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows_B: Tensor) -> Batch:
        chosen = self.rows.index_select(0, rows_B)  # copies whole rows: ten times as fast as x[rows]
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
        return torch.stack([_as_tensor(x, "input") for x, _ in pairs]), _as_labels([y for _, y in pairs])

    @cached_property  # reading them means reading every sample
    def labels(self) -> Tensor:
        return _as_labels([self.dataset[row][1] for row in range(len(self))])


@final
@dataclass(frozen=True)
class Collated:
    """A map-style dataset whose samples `collate` joins into a batch."""

    dataset: Any
    collate: Callable[[list[Any]], Any]

    @property
    def whole_batches(self) -> bool:
        """Whether batches must not be read together: a user's collate may pad to the longest sample of the batch."""
        return self.collate is not stack_samples

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, rows_B: Tensor) -> Batch:
        x, y = as_batch(self.collate([self.dataset[int(row)] for row in rows_B]))
        return x, _classes(y)

    @cached_property  # reading them means reading every sample
    def labels(self) -> Tensor:
        rows = torch.arange(len(self))
        return torch.cat([self.take(chunk)[1] for chunk in rows.split(64)])


def _as_labels(values: list[Any]) -> Tensor:
    return _classes(torch.stack([_as_tensor(value, "label") for value in values]))


def _classes(y: Tensor) -> Tensor:
    """Classes as int64, which losses need; the targets of a regression stay floats."""
    return y if y.is_floating_point() else y.long()


def _as_tensor(value: Any, what: str) -> Tensor:
    """An array, a number or a list of them as a tensor; UserError for text."""
    first = value = as_array(value)
    while isinstance(first, list | tuple) and first:
        first = first[0]
    text = isinstance(first, str | bytes) or getattr(getattr(first, "dtype", None), "kind", "") in ("U", "S", "O")
    if not text:
        try:
            return as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"its {what} is of type {type(value).__name__}, which cannot become a tensor "
                f"({one_line(str(error))}); give tensors, arrays or numbers"
            ) from None
    shown = first if isinstance(first, str | bytes) or not len(first) else str(first.flat[0])
    if what == "label":
        fix = "number the classes from 0, such as torch.tensor([names.index(y) for y in labels])"
    else:
        fix = "turn it into a tensor of numbers in the data set"
    raise UserError(f"its {what} is a text ({in_short(str(shown))}); {fix}")


def subset(examples: Examples, rows: Tensor) -> Examples:
    """Some of a client's samples."""
    if isinstance(examples, Rows):
        return Rows(examples.x, examples.y, examples.rows[rows], examples.prepare)
    return _Chosen(examples, rows)


def split(samples: Examples, chosen: Tensor) -> tuple[Examples, Examples]:
    """The other samples, and the samples that a mask chooses, each in their order."""
    return subset(samples, (~chosen).nonzero().flatten()), subset(samples, chosen.nonzero().flatten())


def stratified(labels: Tensor, wanted: int, seed: int) -> Tensor:
    """A mask of `wanted` samples in which each class has its share, within one sample.

    Each sample is drawn with the same probability: every k-th sample, from a random start, in the order of labels. A
    plain draw would sometimes hold out most of a small class. Then too few samples of that class are left for training,
    while V_i has too many, and P_i looks worse on V_i than it is. Targets without an order are drawn at random.
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
    def whole_batches(self) -> bool:
        return getattr(self.examples, "whole_batches", False)

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
    """The union of several clients' samples. Rows of the same arrays are not copied."""
    first = parts[0]
    rows = [part for part in parts if isinstance(part, Rows)]
    if isinstance(first, Rows) and len(rows) == len(parts) and all(_alike(first, part) for part in rows):
        return Rows(first.x, first.y, torch.cat([part.rows for part in rows]), first.prepare)
    return Pooled(tuple(parts))


def _alike(one: Rows, other: Rows) -> bool:
    return one.x is other.x and one.y is other.y and one.prepare == other.prepare


def as_examples(samples: object) -> Examples:
    """Examples from the forms that users have: tensors, arrays, frames, a map-style dataset, a DataLoader, Examples."""
    if hasattr(samples, "take") and hasattr(samples, "labels") and not hasattr(samples, "to_numpy"):
        return samples  # type: ignore[return-value]  # checked by its two methods; a DataFrame may have both, too
    if isinstance(samples, DataLoader):
        dataset, collate = dataset_of(samples)
        return as_examples(dataset) if collate is None else Collated(dataset, collate)
    if isinstance(samples, IterableDataset):
        raise UserError(f"a client's data is of type {type(samples).__name__}: {STREAM}")
    if isinstance(samples, tuple | list) and len(samples) == 2 and hasattr(samples[0], "shape"):
        x, y = _as_tensor(samples[0], "input"), _as_tensor(samples[1], "label")
        if not isinstance(samples[0], Tensor) and x.dtype == torch.float64:
            x = x.float()  # numpy's default; models have float32
        return _rows(x, _classes(y))
    if of_pandas(samples):
        raise UserError(
            f"a client's data is of type {type(samples).__name__}; give a pair (x, y), such as "
            "(frame.drop(columns='label'), frame['label'])"
        )
    if (columns := of_columns(samples)) is not None:
        return _rows(columns[0], _classes(columns[1]))
    sized = isinstance(samples, Sized) and not isinstance(samples, Mapping | str | bytes)
    if sized and hasattr(samples, "__getitem__"):
        return Collated(samples, stack_samples) if _has_structure(samples) else Listed(samples)
    raise UserError(
        f"a client's data is of type {type(samples).__name__}; give a pair (x, y) of tensors or arrays, "
        "a map-style dataset of (x, y) pairs or of dicts with a label, or a DataLoader of one"
    )


def _rows(x: Tensor, y: Tensor) -> Rows:
    if len(x) != len(y):
        raise UserError(f"a client's data: there are {len(x)} samples but {len(y)} labels; give one label per sample")
    return Rows(x, y, torch.arange(len(x)))


def _has_structure(samples: Any) -> bool:
    """Whether the first sample is more than a pair. `check` reports an unreadable dataset later."""
    try:
        return len(samples) > 0 and has_structure(samples[0])
    except Exception:  # noqa: BLE001  # the user's dataset; `check` reads it again, and reports
        return False


def label_counts(labels: Tensor) -> dict[str, int]:
    """Samples of each class; empty where labels are not classes."""
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    values, counts = labels.unique(return_counts=True)
    return {str(int(v)): int(c) for v, c in zip(values, counts, strict=True)}


def add_samples(digest: Digest, data: Examples) -> None:
    """Add the content of a client's samples to a hash."""
    for rows in torch.arange(len(data)).split(1024):
        for tensor in (one for part in data.take(rows) for one in tensors_of(part)):
            digest.update(str((tensor.shape, tensor.dtype)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())


def sample_hashes(data: Examples, rows: Tensor | None = None, *, labels: bool) -> Iterator[int]:
    """A hash of each sample, of x only or with its label. Equal samples have equal hashes within this process.

    It is Python's hash of 64 bits, twice as fast as a cryptographic hash. Samples that change when they are read
    have other hashes at each read.
    """
    at_once = 1 if getattr(data, "whole_batches", False) else 64  # padding depends on the other samples of a batch
    for chunk in (torch.arange(len(data)) if rows is None else rows).split(at_once):
        x_B, y_B = data.take(chunk)
        for row in zip(*(_bytes(one) for one in (*tensors_of(x_B), *([y_B] if labels else []))), strict=True):
            yield hash(b"".join(part.tobytes() for part in row))


def _bytes(tensor_B: Tensor) -> Any:
    """An array with the bytes of each sample as a row."""
    return tensor_B.detach().cpu().contiguous().reshape(len(tensor_B), -1).view(torch.uint8).numpy()


AT_ONCE: Final = 16  # batches that are read together


@final
@dataclass(frozen=True)
class LocalWork:
    """A client's work in one round: D_i and E epochs. A threat changes that of its attackers.

    A batch of an attacker has `mixed` samples of `mixed_in`; its other samples are the attacker's own.
    """

    data: Examples
    epochs: int
    mixed_in: Examples | None = None
    mixed: int = 0
    honest: bool = True  # an attacker trains w only, with every method

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One epoch: D_i in random order, in batches of `size`."""
        own = size - self.mixed if self.mixed_in is not None else size
        chunks = list(torch.randperm(len(self.data), generator=generator).split(own))
        if len(chunks) > 1 and len(chunks[-1]) == 1 < own:
            chunks[-2:] = [torch.cat(chunks[-2:])]  # BatchNorm cannot train on a batch of one sample
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
    """Several batches, read at once: the time of a small read is mostly that of the call."""
    if getattr(data, "whole_batches", False):
        return [data.take(chunk) for chunk in chunks]
    x, y = data.take(torch.cat(chunks))
    sizes = [len(chunk) for chunk in chunks]
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
