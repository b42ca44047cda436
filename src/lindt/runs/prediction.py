"""Predictions of a client's model for samples as its data hold them, or as the user has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from lindt.data.examples import as_examples
from lindt.data.inputs import as_array, as_inputs
from lindt.errors import UserError
from lindt.protocols import Examples, has_several, tensors_of
from lindt.user_code import describe_error


def predict(model: nn.Module, data: Examples, x: object) -> Tensor:
    """The model's outputs for all samples of `x`, without gradients. `data` are the client's own, which say what fits.

    `x` is a tensor, an array, several inputs, a DataLoader or a dataset.
    """
    sample, batches = data.take(torch.arange(1))[0], _as_batches(x)
    with torch.no_grad():
        return torch.cat([_predicted(model, batch, sample) for batch in batches])


def _as_batches(x: object) -> list[Tensor]:
    """Inputs in the form of the training data, as one batch; those of a DataLoader or a dataset in several batches."""
    try:
        if not _is_dataset(x):
            return [_as_input(x)]
        data, size = as_examples(x), 64
        if isinstance(x, DataLoader):
            if not isinstance(x.sampler, SequentialSampler):
                raise UserError("the DataLoader draws its samples at random; give one without shuffle, or a tensor")
            size = x.batch_size or size
        return [data.take(rows)[0] for rows in torch.arange(len(data)).split(size)]
    except UserError as error:
        raise UserError(f"x: {error}") from error.__cause__
    except Exception as error:
        raise UserError(
            f"x: no inputs can be read from an object of type {type(x).__name__} ({describe_error(error)}); give a "
            "tensor or an array of samples"
        ) from error


def _is_dataset(x: object) -> bool:
    """Whether `x` is a dataset or a DataLoader. Those of Hugging Face have no common class with torch's."""
    if isinstance(x, DataLoader | Dataset):
        return True
    values = isinstance(x, Tensor | Mapping | Sequence) or hasattr(x, "__array__")
    return not values and isinstance(x, Sized) and hasattr(x, "__getitem__")


def _as_input(x: object) -> Tensor:
    """A batch in the form of the training data: numpy's default floats become float32 (data/examples.py)."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping | tuple):
        return as_inputs(x)
    found = torch.as_tensor(as_array(x))
    return found.float() if found.dtype == torch.float64 else found


def _predicted(model: nn.Module, x: Tensor, sample: Tensor) -> Tensor:
    """The outputs for a batch. `sample` is a batch of one of the client's samples, to compare shapes with."""
    shapes = [", ".join(str(tuple(one.shape[1:])) for one in tensors_of(sample))]
    shapes += [", ".join(f"{tuple(one.shape)} of {one.dtype}" for one in tensors_of(x))]
    wanted = f"a sample of the client has shape {shapes[0]} of {tensors_of(sample)[0].dtype}"
    if not has_several(x) and not has_several(sample) and x.dim() != sample.dim():
        raise UserError(f"x: it has shape {shapes[1]}, and {wanted}; give a batch of such samples, x[None] for one")
    try:
        outputs: Tensor = model(x)
    except Exception as error:
        raise UserError(
            f"x: the client's model does not take shape {shapes[1]} ({describe_error(error)}); {wanted}, give a batch "
            "of such samples"
        ) from error
    return outputs
