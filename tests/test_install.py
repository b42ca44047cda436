"""The package as users get it: from a wheel, from an editable install, and imported beside a clone of the repository.

Nothing is downloaded. A fresh venv sees the packages of the running interpreter through a .pth file. Python does not
read the .pth files of a folder that is named this way, so an editable lindt of the running interpreter stays hidden.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRESETS = sorted(path.stem for path in (ROOT / "src" / "lindt" / "plan" / "presets").glob("*.toml"))
FROM_ELSEWHERE = "import lindt, lindt_experiments; print(lindt.__file__); print(lindt.resolve('digits-nfl').rounds)"


@final
@dataclass(frozen=True)
class Installed:
    """A venv with lindt in it, and a folder that holds no part of the repository."""

    folder: Path
    elsewhere: Path

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """The output of a program of the venv; fails with its messages if the program fails."""
        program, *arguments = map(str, words)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env |= {"LINDT_CACHE": str(self.elsewhere / "cache"), "COLUMNS": "200", "NO_COLOR": "1"}
        where = cwd or self.elsewhere
        ran = subprocess.run(
            [self.folder / "bin" / program, *arguments], cwd=where, env=env, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{words}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return ran.stdout


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
@pytest.mark.parametrize("way", ["from_wheel", "editable"])
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
