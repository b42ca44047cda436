"""Samples in the forms that users have: several inputs by name or position, dicts, DataLoaders with a collate_fn.

A batch with one input is a tensor. With several inputs it is `Inputs` (protocols.py), which moves, splits and joins
like a tensor, so that the training loop treats both alike. A model is called as `model(*inputs)` or `model(**inputs)`
(`take_inputs`).

Legend: n samples, B a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from lindt.errors import UserError
from lindt.protocols import Batch, Inputs

LABELS: Final = ("label", "labels", "y", "target", "targets")
STREAM: Final = "it is a stream without a length; give a dataset with a length and an index"


def take_inputs(model: nn.Module) -> nn.Module:
    """Make a user's model accept `Inputs`, and return only the logits, for models of Hugging Face.

    It uses hooks, so that the layers keep their names.
    """

    def unpack(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0].args, args[0].kwargs) if len(args) == 1 and isinstance(args[0], Inputs) else (args, kwargs)

    def logits(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return output if isinstance(output, Tensor) else getattr(output, "logits", output)

    model.register_forward_pre_hook(unpack, with_kwargs=True)
    model.register_forward_hook(logits)
    return model


def as_tensor(value: Any) -> Tensor:
    """A value of the user's as a dense tensor without gradient."""
    found = torch.as_tensor(as_array(value))
    if found.layout != torch.strided:
        raise UserError("a client's data has a sparse tensor; give x.to_dense()")
    return found.detach()


def as_array(value: Any) -> Any:
    """A DataFrame or a Series of pandas as an array; any other value as it is.

    torch would read a Series by the labels of its rows, as if they were positions. pandas may not be installed: the
    type is known by its name. The array is a copy, as one that pandas does not let others write to makes torch warn.
    """
    if not of_pandas(value):
        return value
    found = value.to_numpy(copy=True)
    if found.dtype.kind == "O":
        kinds = sorted(map(str, set(value.dtypes))) if value.ndim > 1 else [str(value.dtype)]
        raise UserError(
            f"a {type(value).__name__} of pandas with values of {', '.join(kinds)} is no array of numbers; number the "
            "texts, fill the gaps, and make all columns of one type, such as frame.astype('float32')"
        )
    return found


def of_pandas(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")


def stack_samples(samples: list[Any]) -> Any:
    """Samples of the same structure as a batch: each tensor, array, list or number is stacked."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _stacked(name, [sample[name] for sample in samples]) for name in first}
    return [_part(f"part {place}", [sample[place] for sample in samples]) for place in range(len(first))]


def _part(name: str, values: list[Any]) -> Any:
    """The stacked values of one part of samples, which may have several inputs itself."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _stacked(key, [value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked(f"{name}[{i}]", [value[i] for value in values]) for i in range(len(first)))
    return _stacked(name, values)


def _stacked(name: object, values: list[Any]) -> Tensor:
    if isinstance(values[0], str | bytes):
        fix = "number the classes from 0" if name in LABELS else "give tokens as numbers, or leave it out"
        raise UserError(f"a sample's {name!r} is text, {values[0]!r:.40}; {fix}")
    try:
        tensors = [as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"a sample's {name!r} is of type {type(values[0]).__name__}, not a tensor ({error}); give arrays or numbers"
        ) from None
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        found = sorted(shapes)
        raise UserError(
            f"samples have {name!r} of different shapes, {found[0]} and {found[-1]}; pad them, or give a DataLoader "
            "with a collate_fn that does"
        )
    return torch.stack(tensors)


def as_batch(found: Any) -> Batch:
    """(x, y) of a batch: from a dict with a label among its fields, or a pair whose x may have several inputs."""
    if isinstance(found, Mapping):
        names = [name for name in found if name in LABELS]
        inputs = [name for name in found if name not in names]
        if len(names) != 1 or not inputs:
            raise UserError(
                f"a sample has the fields {sorted(map(str, found))}; give one label, named as one of "
                f"{', '.join(LABELS)}, and at least one input"
            )
        return as_inputs({name: found[name] for name in inputs}), as_tensor(found[names[0]])
    if not isinstance(found, tuple | list) or len(found) != 2:
        size = f" of {len(found)} parts" if isinstance(found, tuple | list) else ""
        raise UserError(
            f"a sample is a {type(found).__name__}{size}; give pairs (x, y), or ((x1, x2), y) where a model takes "
            "several inputs"
        )
    return as_inputs(found[0]), as_tensor(found[1])


def as_inputs(x: Any) -> Tensor:
    """One input as a tensor, several inputs as `Inputs`, which replace a tensor in a Batch."""
    if isinstance(x, tuple | list):
        x = dict(enumerate(x))
    if not isinstance(x, Mapping):
        return as_tensor(x)
    values = {name: as_tensor(value) for name, value in x.items()}
    return next(iter(values.values())) if len(values) == 1 else cast(Tensor, Inputs(values))


def has_structure(sample: object) -> bool:
    """Whether a sample is more than a pair of an input and a label."""
    if isinstance(sample, Mapping):
        return True
    if not isinstance(sample, tuple | list):
        return False
    return len(sample) != 2 or isinstance(sample[0], Mapping | tuple)


def of_columns(samples: object) -> Batch | None:
    """x and y from columns: a dict of tensors with a label, or a pair with several tensors in x; else None."""
    if isinstance(samples, Mapping):
        return as_batch(samples) if samples and all(hasattr(v, "shape") for v in samples.values()) else None
    if isinstance(samples, tuple | list) and len(samples) == 2 and hasattr(samples[1], "shape"):
        x = samples[0]
        parts = list(x.values()) if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else []
        if parts and all(hasattr(part, "shape") for part in parts):
            return as_batch(samples)
    return None


def dataset_of(loader: DataLoader[Any]) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """A DataLoader's dataset, and its collate_fn if it is not torch's default. The plan draws the batches."""
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(f"a DataLoader's dataset is of type {type(loader.dataset).__name__}: {STREAM}")
    if loader.batch_size is None:
        raise UserError(
            "a DataLoader has no batch_size: its dataset returns batches, or it has a batch_sampler; give a DataLoader "
            "with a batch_size"
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return torch.utils.data.Subset(loader.dataset, list(sampler.indices)), collate
    plain = (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, loader.dataset))
    )
    if not plain and not isinstance(sampler, SequentialSampler):
        raise UserError(
            f"a DataLoader has a {type(sampler).__name__}, which is not used: clients train on each sample once per "
            "epoch; give a DataLoader without it, or the samples as a torch.utils.data.Subset"
        )
    return loader.dataset, collate
