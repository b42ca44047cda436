"""What users have as data in a Flower app, as samples that our loop can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import DataLoader, IterableDataset

from lindt.data.examples import Examples, as_examples
from lindt.errors import UserError


def samples_of(found: object, split: str) -> Examples:
    """What `data(context, split)` gave: a pair of tensors, a dataset, or a DataLoader, whose dataset is taken."""
    if isinstance(found, DataLoader):
        found = found.dataset
    if isinstance(found, IterableDataset):
        raise UserError(f"data: the {split} split is a stream; give a dataset with a length and an index")
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        first = found[0] if len(found) else None
        if isinstance(first, Mapping):
            found = _Paired(found, *_names(first))
    examples = as_examples(found)
    if len(examples) < (2 if split == "train" else 1):
        raise UserError(f"data: the {split} split has {len(examples)} samples; that is too few")
    return examples


def batch_of(found: object) -> int | None:
    size = getattr(found, "batch_size", None)
    return size if isinstance(found, DataLoader) and isinstance(size, int) else None


def _names(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Flower's datasets give tables: `{"img": x, "label": y}`."""
    label = [name for name in sample if name in ("label", "labels", "y", "target")]
    rest = [name for name in sample if name not in label]
    if len(label) != 1 or len(rest) != 1:
        raise UserError(f"data: a sample has {sorted(sample)}; give pairs (x, y), or two fields of which one is label")
    return rest[0], label[0]


@final
@dataclass(frozen=True)
class _Paired:
    dataset: Any
    x: str
    y: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        sample = self.dataset[row]
        return sample[self.x], sample[self.y]
