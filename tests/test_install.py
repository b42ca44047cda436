"""The package as users get it: from a wheel, from an editable install, and imported beside a clone of the repository.

Nothing is downloaded, but for the tests of extras. A fresh venv sees the packages of the running interpreter through a
.pth file. Python does not read the .pth files of a folder that is named this way, so an editable lindt of the running
interpreter stays hidden. The tests of extras install the wheel into an environment that has pip alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
from folders import mended, write_run

from lindt.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "src" / "lindt" / "plan" / "presets").glob("*.toml"))
FROM_ELSEWHERE = "import lindt, lindt_experiments; print(lindt.__file__); print(lindt.resolve('digits-nfl').rounds)"


@final
@dataclass(frozen=True)
class Installed:
    """A venv with lindt in it, and a folder that holds no part of the repository."""

    folder: Path
    elsewhere: Path

    @property
    def environment(self) -> dict[str, str]:
        """Without a path to another lindt."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return kept | {"LINDT_CACHE": str(self.elsewhere / "cache"), "COLUMNS": "200", "NO_COLOR": "1"}

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """The output of a program of the venv; fails with its messages if the program fails."""
        program, *arguments = map(str, words)
        call, where = [self.folder / "bin" / program, *arguments], cwd or self.elsewhere
        ran = subprocess.run(call, cwd=where, env=self.environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return ran.stdout


def fetched(address: str, seconds: float = 120) -> bytes:
    """What a server answers once it listens."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found: bytes = answer.read()
                return found
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


def fresh_venv(folder: Path) -> Path:
    """A venv without pip that sees the packages of the running interpreter, but not its editable installs."""
    venv.create(folder, with_pip=False, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (own / "packages-of-the-tests.pth").write_text("".join(f"{path}\n" for path in seen))
    return folder


def install(target: Path, folder: Path, *what: str | Path) -> Installed:
    # --ignore-installed: pip sees the lindt of the running interpreter, and must leave it alone.
    pip(
        *("--python", fresh_venv(folder) / "bin" / "python", "install", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--ignore-installed", *what),
    )
    target.mkdir()
    return Installed(folder, target)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in a folder named `lindt`, as git clone makes it: a build writes into its sources."""
    folder = tmp_path_factory.mktemp("beside") / "lindt"

    def ignored(where: str, names: list[str]) -> set[str]:
        """Caches and builds everywhere; at the root also runs, results and what begins with a dot."""
        made = {name for name in names if name in ("__pycache__", "node_modules") or name.endswith(".egg-info")}
        outer = {"build", "dist", "runs", "results"} | {name for name in names if name.startswith(".")}
        return made | outer if Path(where) == ROOT else made

    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, clone)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    return install(folder / "elsewhere", folder / "venv", wheel)


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the build backend itself, as `make package` does."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=clone, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def from_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("from_sdist")
    return install(folder / "elsewhere", folder / "venv", sdist)


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("editable")
    return install(folder / "elsewhere", folder / "venv", "--editable", clone)


@pytest.mark.slow
def test_the_wheel_holds_the_data_files_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    presets = {f"lindt/plan/presets/{name}.toml" for name in PRESETS}
    assert {"lindt/py.typed", "lindt/report/page/built.html", *presets} <= names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"lindt", "lindt_experiments"}


@pytest.mark.slow
def test_the_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    presets = {f"src/lindt/plan/presets/{name}.toml" for name in PRESETS}
    needed = {"pyproject.toml", "README.md", "LICENSE", "src/lindt/report/page/built.html", "src/lindt/py.typed"}
    assert sources | presets | needed <= names


@pytest.mark.slow
def test_the_demo_works_from_a_wheel(from_wheel: Installed) -> None:
    assert "healthy control" in from_wheel.command("lindt", "demo", "--rounds", "1", "--out", "demo")


@pytest.mark.slow
def test_the_live_page_works_from_a_wheel(from_wheel: Installed) -> None:
    (from_wheel.elsewhere / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    call = [from_wheel.folder / "bin" / "lindt", "watch", "runs", "--port", str(port)]
    with subprocess.Popen(call, cwd=from_wheel.elsewhere, env=from_wheel.environment) as server:
        try:
            assert b"<html" in fetched(f"http://127.0.0.1:{port}/")
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["from_wheel", "from_sdist", "editable"])
def test_an_installed_lindt_works_in_another_folder(way: str, clone: Path, request: pytest.FixtureRequest) -> None:
    installed: Installed = request.getfixturevalue(way)
    expected = clone / "src" if way == "editable" else installed.folder
    file, rounds = installed.command("python", "-c", FROM_ELSEWHERE).splitlines()
    assert Path(file).is_relative_to(expected)
    assert rounds == "80"

    assert "reproduce" in installed.command("lindt", "--help")
    listed = installed.command("lindt", "run", "--help")
    assert [name for name in PRESETS if name not in listed] == []
    resolved = "from lindt.plan.file import preset_names, resolve; print(*[resolve(n).name for n in preset_names()])"
    assert installed.command("python", "-c", resolved).split() == PRESETS
    assert "table3" in installed.command("lindt", "reproduce", "--list")

    installed.command("lindt", "run", "digits-nfl", "--rounds", "2", "--set", "alone.epochs=1", "--out", "run")
    lines = (installed.elsewhere / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]
    assert "2 rounds" in installed.command("lindt", "show", "run")
    installed.command("lindt", "report", "run", "-o", "report.html")
    page = (installed.elsewhere / "report.html").read_text()
    built = (ROOT / "src" / "lindt" / "report" / "page" / "built.html").read_text()
    program = built.partition('id="data">null</script>')[2]  # all that follows the place of the run's data
    assert len(program) > 50_000
    assert program in page


@pytest.mark.slow
@pytest.mark.parametrize("way", ["from_wheel", "editable"])
def test_a_script_beside_the_clone_imports_the_package(way: str, clone: Path, request: pytest.FixtureRequest) -> None:
    """There `lindt` is also the name of the clone's folder, which Python could take for an empty namespace package."""
    installed: Installed = request.getfixturevalue(way)
    beside = clone.parent
    installed.command("python", "-c", "import lindt; lindt.resolve", cwd=beside)
    script = beside / "own_script.py"
    script.write_text("import lindt\nprint(lindt.resolve('digits-nfl').name)\n")
    assert installed.command("python", script, cwd=beside) == "digits-nfl\n"


@pytest.mark.parametrize("where", ["the repository", "its parent", "beside a folder named lindt"])
def test_the_package_that_is_imported_is_the_one_in_src(where: str, tmp_path: Path) -> None:
    (tmp_path / "lindt" / "docs").mkdir(parents=True)
    cwd = {"the repository": ROOT, "its parent": ROOT.parent}.get(where, tmp_path)
    code = "import lindt; print(lindt.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert Path(ran.stdout.strip()) == ROOT / "src" / "lindt" / "__init__.py"


ADVICE = {  # commands that need an extra
    ("demo",): "simulation",
    ("run", "digits-nfl"): "simulation",
    ("plan", "digits-nfl"): "simulation",
    ("methods",): "simulation",
    ("watch", "runs"): "page",
    ("figure", "3", "--results", "results"): "figures",
}
READING = """
import lindt, sys
run = lindt.open("runs/one")
assert run.state == "ended" and len(run.rounds) == 10, (run.state, len(run.rounds))
assert run.report("page.html").stat().st_size > 50_000
for name in ("federate", "Plan", "run"):
    try:
        getattr(lindt, name)
    except lindt.UserError as error:
        assert "pip install 'lindt[simulation]'" in str(error), error
        assert isinstance(error, ImportError)
    else:
        raise AssertionError(name)
detector = lindt.Detector()
verdicts = [detector.observe(gains=dict.fromkeys(range(10), -0.3), samples=200) for _ in range(30)]
assert verdicts[-1].state == "hurts", verdicts[-1]
assert not {"torch", "numpy", "matplotlib", "starlette"} & sys.modules.keys()
print(run.verdict.headline)
"""
# Two groups of clients with opposite labels: no shared model serves both.
FLOWER = """
import json, sys, numpy as np
from pathlib import Path
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from lindt.flower import NFLDetector, wrap
import lindt

def data(context, rows):
    i = int(context.node_config["partition-id"])
    x = np.random.default_rng(i).normal(size=(500, 5))
    return x[rows], (x @ [1, -1, 0.5, 2, 1] > 0) ^ (i % 2 == 1)

app = ClientApp()

@app.train()
def train(msg, context):
    w, (x, y) = msg.content["arrays"]["w"].numpy().copy(), data(context, slice(100))
    for _ in range(20):
        w -= 0.5 * x.T @ (1 / (1 + np.exp(-x @ w)) - y[:100]) / 100
    records = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 100})}
    return Message(RecordDict(records), reply_to=msg)

@app.evaluate()
def evaluate(msg, context):
    x, y = data(context, slice(100, None))
    right = float(((x @ msg.content["arrays"]["w"].numpy() > 0) == y[100:]).mean())
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": 400})}), reply_to=msg)

strategy = NFLDetector(FedAvg(), folder="runs/flower")
grid = FakeGrid(wrap(app, folder=Path("private")), 6)
strategy.start(grid, ArrayRecord({"w": Array(np.zeros(5))}), num_rounds=15)
found = lindt.open("runs/flower")
scores = found.scores.to_dict("records")
assert strategy.verdict.state == "hurts", strategy.verdict
assert json.loads(Path("runs/flower/rounds.jsonl").read_text().splitlines()[-1])["recovering"]
assert len(scores) == 6 and all(row["local"] > 0.8 for row in scores), scores
assert not {"torch", "matplotlib", "starlette"} & sys.modules.keys()
print(found.verdict.headline)
"""


def size_of(folder: Path) -> float:
    """Megabytes of the packages in a venv."""
    (packages,) = folder.glob("lib/python*/site-packages")
    return sum(path.stat().st_size for path in packages.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def add(installed: Installed, wheel: Path, extra: str) -> None:
    name = f"lindt[{extra}]" if extra else "lindt"
    installed.command(
        "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{name} @ {wheel.as_uri()}"
    )


@pytest.mark.slow
def test_each_extra_brings_what_its_commands_need(wheel: Path, tmp_path: Path) -> None:
    """In one environment, from the base on; torch is never installed in it."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    elsewhere = tmp_path / "elsewhere"
    write_run(elsewhere / "runs" / "one", mended())
    shutil.copytree(ROOT / "results", elsewhere / "results")
    installed = Installed(folder, elsewhere)

    def refused(*words: str) -> str:
        call = [folder / "bin" / "lindt", *words]
        ran = subprocess.run(call, cwd=elsewhere, env=installed.environment, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
        return ran.stderr

    add(installed, wheel, "")
    packages = installed.command("python", "-m", "pip", "list", "--format=freeze").lower()
    assert not any(
        name in packages for name in ("torch", "numpy", "matplotlib", "starlette", "scikit", "scipy", "flwr")
    )
    assert "lindt 0" in installed.command("lindt", "--version")
    assert "reproduce" in installed.command("lindt", "--help")
    assert "LINDT on detection" in installed.command("lindt", "runs", "runs")
    assert "since round 3" in installed.command("lindt", "show", "runs/one")
    installed.command("lindt", "table", "runs", "-o", "t.csv")
    installed.command("lindt", "report", "runs", "-o", "r.html")
    assert installed.command("python", "-c", READING).strip()
    for words, extra in ADVICE.items():
        assert refused(*words).endswith(f"is not installed; pip install 'lindt[{extra}]'\n"), words
    assert "pip install 'lindt[flower]'" in refused("vault", "list")

    add(installed, wheel, "page")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    call = [folder / "bin" / "lindt", "watch", "runs", "--port", str(port)]
    with subprocess.Popen(call, cwd=elsewhere, env=installed.environment) as server:
        try:
            assert b"<html" in fetched(f"http://127.0.0.1:{port}/")
        finally:
            server.terminate()

    add(installed, wheel, "figures")
    installed.command("lindt", "figure", "3", "--results", "results", "-o", "pictures")
    assert list((elsewhere / "pictures").glob("*.svg"))

    add(installed, wheel, "flower")
    shutil.copy(ROOT / "tests" / "flower" / "fake_grid.py", elsewhere)
    assert installed.command("python", "-c", FLOWER) == "Federation hurts, recovery is on\n"
    assert "torch" not in installed.command("python", "-m", "pip", "list", "--format=freeze").lower()


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "most"), [("", 60), ("page", 70), ("figures", 240), ("flower", 300)])
def test_the_size_of_an_extra(extra: str, most: int, wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own; without pip. docs/install.md has the sizes."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    before = size_of(folder)
    add(Installed(folder, tmp_path), wheel, extra)
    size = size_of(folder) - before
    print(f"FIGURE size of lindt[{extra}]: {size:.0f} MB")  # noqa: T201
    assert size < most


def test_the_extras_that_errors_name_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"scikit-learn": "sklearn", "dp-accounting": "dp_accounting", "pillow": "PIL"}
    for extra, packages in EXTRAS.items():
        names = [re.split("[<>=]", requirement)[0] for requirement in project[extra]]
        assert {imported.get(name, name) for name in names} <= set(packages), extra
