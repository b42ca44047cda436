"""The command line as a person or a script meets it: what is printed, what is written, the exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

SMALL = ["--set", "alone.epochs=2", "--set", "model.kind=linear", "--set", "method.adaptation.kind=global_only"]
BY_DELTA = ["--set", "detection=delta", "--set", "method=runtime", "--set", "method.recovery.patience=0"]
DUAL = ["--set", "alone.epochs=2", *BY_DELTA]


class Called(NamedTuple):
    stdout: str
    stderr: str


class Call(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> Called: ...


@pytest.fixture
def process(tmp_path: Path) -> Call:
    """Run the real command in an empty folder; stderr lists the modules that it imports."""
    env = environment(tmp_path) | {"PYTHONPROFILEIMPORTTIME": "1"}

    def call(*arguments: str, code: int = 0) -> Called:
        done = subprocess.run(
            [sys.executable, "-m", "lindt.cli", *arguments],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return Called(done.stdout, done.stderr)

    return call


@pytest.fixture
def lindt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The same in this process, which has imported torch already: a task's module is forgotten after each call."""
    from lindt.cli import main

    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def call(*arguments: str, code: int = 0) -> Called:
        capsys.readouterr()
        before = signal.getsignal(signal.SIGTERM)
        try:
            monkeypatch.setattr(sys, "argv", ["lindt", *arguments])
            with pytest.raises(SystemExit) as ended:
                main.main()
        finally:
            signal.signal(signal.SIGTERM, before)
            own = [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]
            for name in own:
                del sys.modules[name]
        said = Called(*capsys.readouterr())
        assert (ended.value.code or 0) == code, said.stdout + said.stderr
        return said

    return call


def environment(folder: Path) -> dict[str, str]:
    warnings = "error,ignore:'click:DeprecationWarning"  # as in pyproject.toml
    return os.environ | {"LINDT_CACHE": str(folder / "cache"), "COLUMNS": "120", "PYTHONWARNINGS": warnings}


def test_run_says_what_happens_and_leaves_a_folder(process: Call, lindt: Call, tmp_path: Path) -> None:
    said, imported = process("run", "--rounds", "2", "--out", "mine", *DUAL)
    assert "round 1: NFL suspected: Delta was above epsilon = 0.1 in 1 rounds, more than r' = 0" in said
    assert "points worse than alone on average, clearly worse off" in " ".join(said.split())
    assert "confirmed" not in said
    assert "no meaningful guarantee" in " ".join(said.split())
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "torch" in modules
    assert not {"sklearn", "scipy", "dp_accounting"} & modules  # they would take half of a small run's time
    assert (tmp_path / "mine" / "summary.json").exists()
    assert "mine" in lindt("run", "--out", "mine", "--resume").stdout  # ended: exits 0 and changes nothing


def test_json_lines_for_machines(lindt: Call) -> None:
    lines = [json.loads(line) for line in lindt("run", "--rounds", "2", "--json", *SMALL).stdout.splitlines()]
    assert [line["event"] for line in lines] == ["round", "round", "end"]
    assert lines[0]["round"] == 1
    assert lines[-1]["folder"] == "runs/digits-nfl-seed0"


def test_compare_prints_a_table_with_references(lindt: Call) -> None:
    common = ["--rounds", "2", "--set", "alone.epochs=2"]
    said = lindt("compare", "--methods", "fedavg,lindt-tm", *common).stdout
    for word in ("fedavg", "lindt-tm", "alone", "centralized", "central", "local", "beta", "worse off"):
        assert word in said
    again = lindt("compare", "--methods", "fedavg,lindt-tm", "--json", "--resume", *common).stdout.splitlines()
    assert [json.loads(line)["event"] for line in again] == ["end", "end", "reference", "detectors"]
    assert json.loads(again[-1])["alarms"]["fedavg"].keys() == {"gain", "warning", "fl_guard", "delta"}


TASK = """
import torch
from lindt import Problem
def problem(broken, in_test=False):
    def data(client):
        g = torch.Generator().manual_seed(client)
        x, y = torch.randn(40, 6, generator=g), torch.randint(2, (40,), generator=g)
        part = slice(30, None) if in_test else slice(0, 30)
        if client in broken:
            x[part] = float("nan")
        return (x[:30], y[:30]), (x[30:], y[30:])
    return Problem([data(i) for i in range(4)], lambda: torch.nn.Linear(6, 2))
def one(): return problem({3})
def in_test(): return problem({2}, in_test=True)
def every(): return problem({0, 1, 2, 3})
"""
# The checks before training would refuse NaN; this is what a run does with it.
OWN = ["--no-preflight", "--rounds", "3", "--set", "alone.epochs=1", "--set", "method.adaptation.kind=global_only"]


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("one", "client 3 (3 of its 3 updates refused, its weights hold NaN or infinity)"),
        ("in_test", "client 2 (NaN or infinity in its data)"),
    ],
)
def test_a_client_with_nan_in_its_data_is_named_and_not_counted(
    lindt: Call, tmp_path: Path, task: str, named: str
) -> None:
    (tmp_path / "nan_task.py").write_text(TASK)
    everyone = ["--set", "environment.participation.rate=1.0", "--set", "scoring.every=3"]
    said = lindt("run", "--task", f"nan_task:{task}", *OWN, *everyone, "--out", "mine").stdout
    assert f"left out of the gain on test data: {named}" in " ".join(said.split())
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "mine" / "rounds.jsonl").read_text().splitlines()]
    broken = 3 if task == "one" else 2
    scored = [line["scores"]["clients"] for line in lines if line["scores"]]
    betas = [one["beta"] for clients in scored for one in clients if one["client"] != broken]
    assert (summary["counted_clients"], summary["beta"]) == (3, pytest.approx(sum(betas) / len(betas)))
    assert json.loads(lindt("show", "mine", "--json").stdout)["left_out_clients"] == [broken]


def test_a_run_without_a_valid_update_is_an_error(lindt: Call, tmp_path: Path) -> None:
    (tmp_path / "nan_task.py").write_text(TASK)
    words = "no valid update came back in any of 3 rounds, "
    assert words in lindt("run", "--task", "nan_task:every", *OWN, "--out", "mine", code=2).stderr
    assert words in lindt("run", "--out", "mine", "--task", "nan_task:every", "--resume", code=2).stderr
    shown = json.loads(lindt("show", "mine", "--json").stdout)
    assert shown["verdict"].startswith("No valid update came back in any of 3 rounds, ")


def test_methods_and_describe(lindt: Call, tmp_path: Path) -> None:
    assert "trimmed_mean(share=0.2)" in lindt("methods").stdout
    said = lindt("data", "describe", "digits-nfl", "-o", "labels.png").stdout
    assert "20 clients, 90 samples each" in said
    assert (tmp_path / "labels.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(lindt("data", "describe", "--json", "-o", "labels.png").stdout)
    assert sum(sum(one["labels"].values()) for one in found["clients"]) == sum(one["train"] for one in found["clients"])


@pytest.mark.slow
def test_export_is_checked_against_the_run(lindt: Call, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    lindt("run", "--rounds", "4", "--out", "mine", *DUAL, "--set", "environment.participation.rate=1.0")
    said = lindt("export", "mine", "--client", "7").stdout
    assert "the client's own (shared and private weights) after round 4" in said
    folder = tmp_path / "mine" / "export" / "client-7"
    weights = load_file(folder / "model.safetensors")
    assert weights["shared.fc2.weight"].shape == weights["private.fc2.weight"].shape == (10, 64)
    assert not torch.equal(weights["shared.fc2.weight"], weights["private.fc2.weight"])
    # A plain module: it needs nothing of lindt, and takes a batch of any size.
    script = "import sys, torch; m = torch.export.load(sys.argv[1]).module(); print(m(torch.zeros(5, 1, 8, 8)).shape); assert not any(n.startswith('lindt') for n in sys.modules)"  # fmt: skip  # noqa: E501
    done = subprocess.run([sys.executable, "-c", script, str(folder / "model.pt2")], capture_output=True, text=True)
    assert done.stdout.strip() == "torch.Size([5, 10])", done.stderr
    assert "exists already" in lindt("export", "mine", "--client", "7", code=2).stderr
    assert "clients 0 to 19" in lindt("export", "mine", "--client", "20", code=2).stderr


MISTAKES = [
    (
        ["run", "--set", "environment.privacy.sigm=1"],
        "environment.privacy.sigm = 1: no such field; did you mean 'sigma'?",
    ),
    (["run", "--set", "rounds=many"], "rounds = 'many': give a whole number"),
    (["run", "--set", "environment.participation.active_clients=30"], "there are 20 clients; give 20 or fewer"),
    (["run", "--set", "data.allocation={kind='classes', per_client=11}"], "data.allocation.per_client = 11"),
    (["run", "--set", "method.aggregator={kind='trimmed_mean', share=0.5}"], "method.aggregator.share = 0.5"),
    (["run", "--set", "method=watch", "--set", "method.recovery.epsilon=0"], "method.recovery.epsilon = 0.0"),
    (
        ["run", "--set", "detection=delta"],
        "detection = 'delta': on_evidence follows the clients' reports: set detection",
    ),
    (["run", "--set", "alone.private=false"], "alone.private = False: reports compare w with a private model: set"),
    (
        ["run", "--set", "method.adaptation.adaptation.points=['fc9']"],
        "method.adaptation.adaptation.points = 'fc9': no such submodule",
    ),
    (
        ["run", "--set", "method.adaptation=dual", "--set", "method.adaptation.points=['fc9']"],
        "method.adaptation.points = 'fc9': no such submodule",
    ),
    (["run", "--set", "method.adaptation.adaptation.points=['fc2']"], "its output is the model's output"),
    (["run", "--set", "model=cnn"], "client 0: the model does not take inputs of shape"),
    (["run", "--set", "environment.threat.relabel=[[4,99]]"], "environment.threat: labels from -1 to 99"),
    (["run", "--set", "data.test_share=0.0001"], "data.clients = 20"),
    (["data", "describe", "-o", "x.foo"], "name a .png, .svg or .pdf file"),
    (["data", "describe", "-o", "/nonexistent/x.png"], "No such file or directory"),
    (["compare", "--methods", "fedavg,fedavg"], "--methods names fedavg twice"),
    (["compare", "--set", "method.aggregator=median"], "compare takes its methods from --methods"),
    (["run", "--set", "environment.threat.per_batch=10"], "environment.threat.per_batch = 10"),
    (["run", "--set", "environment.threat.relabel=[[44,1]]"], "environment.threat.relabel"),
    (["run", "nowhere.toml"], "plan 'nowhere.toml': No such file"),
    (["run", "--engine", "warp"], "--engine warp"),
    (["run", "--device", "tpu"], "--device tpu: choose among cpu, cuda"),
    (["run", "--set", "data.allocation.kind=roles"], "role"),
    (["run", "--out", "/proc/no/run"], "cannot be written"),
    (["run", "--task", "nothing"], "package.module:function"),
    (["compare", "--methods", "fedsgd"], "--methods fedsgd: choose among"),
    (["export", "nowhere", "--client", "1"], "is not a run"),
    (["run", "--rounds", "0"], "rounds = 0: give at least 1 round"),
]


@pytest.mark.parametrize(("arguments", "complaint"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lindt.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["lindt", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        main.main()
    signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert complaint in said
    assert not (tmp_path / "runs").exists()  # nothing was begun


def stopped_by(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, where a command ends with this error."""
    from lindt.cli import main

    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    before = signal.getsignal(signal.SIGTERM)
    try:
        main.main()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs"), "error: runs: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.toml"), "error: x.toml: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "error: Address already in use"),
        (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), None),
        (PermissionError(errno.EPERM, "Operation not permitted"), None),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
        (ChildProcessError(errno.ECHILD, "No child processes"), None),
        (OSError("something else"), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, OSError) else str(value)[:20],
)
def test_an_error_of_the_system_is_one_line_only_where_the_user_can_mend_it(
    error: OSError, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError if said is None else SystemExit) as stopped:
        stopped_by(error, monkeypatch)
    assert capsys.readouterr().err == ("" if said is None else said + "\n")
    assert stopped.value is error or isinstance(stopped.value, SystemExit)


def test_a_run_that_exists_is_not_touched(lindt: Call, tmp_path: Path) -> None:
    lindt("run", "--rounds", "1", "--out", "mine", *SMALL)
    kept = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    assert "holds a run already" in lindt("run", "--rounds", "1", "--out", "mine", *SMALL, code=2).stderr
    assert {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()} == kept


DELTA = ["--set", "method=fedavg", "--set", "model.kind=linear", "--set", "detection=delta", "--set", "alone.epochs=1"]


def test_a_run_branches_from_a_kept_checkpoint_of_another(lindt: Call, tmp_path: Path) -> None:
    lindt("run", "--rounds", "2", "--keep-checkpoint", "1", "--out", "first", *DELTA)
    said = lindt("run", "--branch", "first", "--rounds", "3", "--out", "second").stdout
    assert "digits-nfl: branched from digits-nfl after round 1" in said
    first, second = ((tmp_path / name / "rounds.jsonl").read_text().splitlines() for name in ("first", "second"))
    assert first[0] == second[0]
    assert len(second) == 3
    for words, wrong in {
        ("--at", "1"): "--at: it is the round of --branch",
        ("--branch", "first"): "--branch: name the folder of the new run by --out",
        ("--branch", "none", "--out", "new"): "--branch none: it holds no run",
        ("--branch", "first", "--out", "new", "--engine", "flower"): "not with --engine flower",
    }.items():
        assert wrong in lindt("run", *words, code=2).stderr


def test_ctrl_c_that_an_import_makes_an_import_error_of_stops_the_run(
    lindt: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def importing(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("initialization failed") from interrupt

    monkeypatch.setattr("lindt.runs.play.problem_for", importing)
    assert "stopped" in lindt("run", "digits-nfl", "--out", "cut", code=130).stdout
    monkeypatch.setattr("lindt.cli.execution.play", importing)
    lindt("run", "digits-nfl", "--out", "cut", code=130)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_says_how_to_go_on_and_goes_on_to_the_same_bytes(
    lindt: Call, tmp_path: Path, number: int
) -> None:
    plan = ["--rounds", "12", "--set", "name=a-name-of-its-own", *DUAL]
    command = [sys.executable, "-m", "lindt.cli", "run", "--out", "cut", *plan]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    lines = tmp_path / "cut" / "rounds.jsonl"
    deadline = time.monotonic() + 300
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "--resume continues" in said
    assert json.loads(lindt("runs", ".", "--json").stdout.splitlines()[0])["state"] == "stopped"
    assert json.loads((Path("cut") / "run.json").read_text())["stopped"] is True
    assert 3 <= lines.read_bytes().count(b"\n") < 12
    assert "a-name-of-its-own: resumed after round" in lindt("run", "--out", "cut", "--resume").stdout
    lindt("run", "--out", "straight", *plan)
    assert lines.read_bytes() == (tmp_path / "straight" / "rounds.jsonl").read_bytes()


def test_help_does_not_import_torch() -> None:
    script = "import sys; sys.argv = ['lindt', '--help']\nfrom lindt.cli.main import main\ntry: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"  # fmt: skip  # noqa: E501
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout


def test_the_flags_are_frozen() -> None:
    import typer.main

    from lindt.cli.main import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {name: sorted(o for p in command.params for o in p.opts if o.startswith("-")) for name, command in commands.items()}  # fmt: skip  # noqa: E501
    common = ["--rounds", "--seed", "--out", "--engine", "--device", "--resume", "--task", "--set", "--json", "--track"]
    common += ["--no-preflight"]
    flower = ["--superlink", "--root-certificates", "--noise", "--deadline", "--gather", "--comeback", "--nodes"]
    flower += ["--withhold"]
    assert flags["run"] == sorted([*common, *flower, "--keep-checkpoint", "--branch", "--at"])
    assert flags["compare"] == sorted(["--methods", "--aggregators", "--attacks", *common])
    assert flags["show"] == flags["runs"] == ["--json"]
    assert flags["report"] == sorted(["-o", "--out"])
    assert flags["table"] == sorted(["-o", "--out", "--per"])
    assert flags["watch"] == sorted(["--host", "--port", "--token"])
    assert flags["export"] == sorted(["--client", "-o", "--out", "--task", "--json"])
    assert flags["plan"] == sorted(["--json", "--set", "--task", "--toml"])
    assert set(commands) == {
        "run", "compare", "demo", "runs", "show", "report", "table", "watch", "figure", "reproduce",
        "methods", "export", "data", "vault", "plan",
    }  # fmt: skip


def test_the_version_is_the_packages(lindt: Call) -> None:
    from lindt import __version__

    assert lindt("--version").stdout == f"lindt {__version__}\n"


def test_a_new_run_goes_into_an_empty_folder_only(lindt: Call, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    for more in ([], ["--resume", "--rounds", "1"]):
        said = lindt("run", "--out", "notes", *SMALL, *more, code=2).stderr
        assert "--out notes: it is not empty and not a run (it holds diary.txt); name another folder" in said
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["diary.txt"]


def test_a_run_that_was_killed_before_its_plan_was_written_can_be_begun_again(lindt: Call, tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    for name in ("run.json", "lock", ".plan.toml.123"):
        (tmp_path / "cut" / name).touch()
    lindt("run", "--out", "cut", "--rounds", "1", "--resume", *SMALL)
    assert (tmp_path / "cut" / "summary.json").exists()


def test_resume_without_a_run_and_without_a_plan_is_refused(lindt: Call, tmp_path: Path) -> None:
    said = lindt("run", "--out", "nothing", "--resume", code=2).stderr
    assert "--resume: nothing holds no run; name the folder of a run, or a plan to begin one with" in said
    assert not (tmp_path / "nothing").exists()


def test_runs_are_deleted_by_name_and_nothing_else_is(lindt: Call, tmp_path: Path) -> None:
    for name in ("one", "two"):
        lindt("run", "--rounds", "1", "--out", f"runs/{name}", *SMALL)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "two")
    (tmp_path / "other").mkdir()
    for wrong in ("other", "runs/link", "runs/none"):
        assert "error: " in lindt("runs", "rm", "runs/one", wrong, code=2).stderr
    assert {row["run"] for row in map(json.loads, lindt("runs", "--json").stdout.splitlines())} == {"one", "two"}
    assert "runs/one: deleted" in lindt("runs", "rm", "runs/one").stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["link", "two"]
    assert "name the folders" in lindt("runs", "rm", code=2).stderr


CROWD = """
rounds = 2
[data]
source = "two-camps-crowd"
clients = 100
[model]
kind = "mlp"
features = 16
hidden = 4
[alone]
epochs = 1
patience = 1
[scoring]
panel = 3
"""


def test_compare_leaves_centralized_training_out_where_clients_are_lazy(lindt: Call, tmp_path: Path) -> None:
    (tmp_path / "crowd.toml").write_text(CROWD)
    said = lindt("compare", "crowd.toml", "--methods", "fedavg").stdout
    assert "centralized training is left out: it would read the data of all 100 lazy clients" in said
    lines = lindt("compare", "crowd.toml", "--methods", "fedavg", "--json", "--resume").stdout.splitlines()
    reference = json.loads(lines[-2])
    assert (reference["event"], reference["centralized"]) == ("reference", None)
    assert 0 <= reference["alone"] <= 1


def test_a_folder_is_named_as_it_is_written(lindt: Call, tmp_path: Path) -> None:
    """Square brackets are no markup, and an output that cannot encode a character escapes it."""
    name = "[bold]r\N{LATIN SMALL LETTER A WITH DIAERESIS}um"
    assert lindt("run", "--rounds", "1", "--out", name, *SMALL).stdout.splitlines()[-1] == f"  {name}"
    assert lindt("export", name, "--client", "0").stdout.splitlines()[-1] == f"{name}/export/client-0"
    command = [sys.executable, "-m", "lindt.cli", "runs", "."]
    ascii_only = environment(tmp_path) | {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=ascii_only, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "[bold]r\\xe4um" in done.stdout
