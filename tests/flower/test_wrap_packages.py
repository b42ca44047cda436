"""Apps on opacus, Lightning, transformers and PEFT, unchanged and with two lines more. Slow: the packages are large."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("opacus")
pytest.importorskip("pytorch_lightning")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from apps import package_apps
from apps.federation import CLIENTS
from apps.torch_apps import NOISE
from opacus.optimizers import DPOptimizer
from small_apps import heard
from test_wrap_apps import ROUNDS, check_bytes, check_hurts, two_lines, visits

from lindt.server.detection.gain import Gain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),  # opacus: noise from torch's generator
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),  # opacus
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),  # Lightning calls torch so
    pytest.mark.filterwarnings("ignore:The '(train|test)_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]
SHORT = 8  # rounds where nothing is to be found


@pytest.mark.parametrize("name", package_apps.CASES)
def test_two_lines_are_all_that_it_needs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, noise = package_apps.CASES[name], list[float]()
    assert not case.wrap
    assert not case.detector
    add = DPOptimizer.add_noise

    def heard(self: Any) -> None:
        noise.append(self.noise_multiplier)
        add(self)

    with monkeypatch.context() as patch:
        patch.setattr(DPOptimizer, "add_noise", heard)
        run = two_lines(case, tmp_path, "hurts")
    check_hurts(case, run)
    check_bytes(case, run)
    assert set(noise) == ({NOISE} if name == "opacus" else set())
    if name == "peft":
        metrics = run[1].train_metrics_clientapp[ROUNDS]
        assert all(".lora_" in array or ".score." in array for array in run[1].arrays)
        assert metrics["lindt-spread-product"] > 0


def test_dp_sgd_by_opacus_reports_with_noise_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, noise = package_apps.CASES["opacus"], list[float]()
    add = DPOptimizer.add_noise

    def listening(self: Any) -> None:
        noise.append(self.noise_multiplier)
        add(self)

    with heard() as said:
        two_lines(case, tmp_path / "silent", "hurts", 2)
    assert sum("its train function adds noise (DP-SGD by opacus)" in text for text in said) == CLIENTS
    assert any(f"{CLIENTS} do not report, because their updates have noise" in text for text in said)
    monkeypatch.setattr(DPOptimizer, "add_noise", listening)
    told = replace(case, detector={"detection": Gain(noise=0.05)})
    detector, result, grid = two_lines(told, tmp_path / "told", "hurts")
    assert [m["lindt-reports"] for m in result.train_metrics_clientapp.values()] == [CLIENTS] * ROUNDS
    assert detector.verdict.state == "hurts"
    assert detector.state.on
    assert detector.scores is None
    assert any(visit.recovers for visit in visits(grid))
    assert set(noise) == {NOISE}  # for w, P_i and v_i alike


@pytest.mark.parametrize("name", package_apps.CASES)
def test_nobody_is_asked_to_recover_where_federation_helps(name: str, tmp_path: Path) -> None:
    detector, result, grid = two_lines(package_apps.CASES[name], tmp_path, "helps", SHORT)
    assert detector.verdict.state != "hurts"
    assert not package_apps.CASES[name].reports or detector.verdict.gain > 0
    assert [m["lindt-recovering"] for m in result.train_metrics_clientapp.values()] == [0] * SHORT
    assert len(grid.received) == 2 * CLIENTS * SHORT
