"""Flower's own commands to start and follow a run: a SuperLink that simulates, and submit, status, stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final
from urllib.error import URLError

import tomli_w

from lindt.errors import UserError

NAME: Final = "lindt"  # of the connection in a configuration of our own
ANSWERS: Final = 60  # seconds after which a command of Flower counts as unanswered
KEPT: Final = "the rounds so far are kept: resume with --resume"
# Nothing leaves the machine unasked: no telemetry of Flower or Ray, no check for updates.
QUIET: Final = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def environment(home: Path | None = None) -> dict[str, str]:
    """The environment of Flower's processes: they find its commands beside this Python, and modules as this process."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join([str(Path.cwd()), *(p for p in sys.path if p)])  # so that a --task is found there too
    there = {} if home is None else {"FLWR_HOME": str(home)}
    return os.environ | QUIET | {"PATH": path, "PYTHONPATH": modules} | there


@final
@dataclass(frozen=True)
class SuperLink:
    """A connection by name. `extra` is added to every submission: the size of a simulation."""

    name: str
    env: Mapping[str, str]
    extra: tuple[str, ...] = ()
    address: tuple[str, int] | None = None  # if it is known, `check` can tell at once that the SuperLink is gone

    def submit(self, app: Path) -> str:
        found = self._ask("run", str(app), self.name, *self.extra)
        if not found.get("success") or not found.get("run-id"):
            raise UserError(f"Flower did not accept the run: {found.get('error-message') or found}")
        return str(found["run-id"])

    def status(self, run: str) -> str:
        """`running`, `finished:completed`, `finished:failed` ... Raises UserError if the SuperLink is gone."""
        self.check()
        runs = self._ask("list", self.name, "--run-id", run).get("runs") or [{}]
        return str(runs[0].get("status", "unknown"))

    def check(self) -> None:
        if self.address is not None:
            try:
                socket.create_connection(self.address, timeout=10).close()
            except OSError as error:
                raise UserError(f"the SuperLink is gone ({error}); {KEPT}") from None

    def stop(self, run: str) -> None:
        """Stop the run, if the SuperLink is still there."""
        with suppress(UserError):
            self.check()
            self._flwr("stop", run, self.name)

    def _ask(self, *words: str) -> dict[str, Any]:
        done = self._flwr(*words, "--format", "json")
        start = done.stdout.find("{")  # it may print other lines before its answer
        try:
            found, _ = json.JSONDecoder().raw_decode(done.stdout[max(start, 0) :])
        except ValueError:
            said = " ".join((done.stderr or done.stdout).split())[-400:]
            raise UserError(f"`flwr {words[0]}` failed: {said}") from None
        return found if isinstance(found, dict) else {}

    def _flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "flwr"), *words]
        try:
            return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=ANSWERS)
        except subprocess.TimeoutExpired:  # without an answer it retries without end
            raise UserError(f"`flwr {words[0]}` had no answer within {ANSWERS} s; {KEPT}") from None


@contextmanager
def connected(superlink: str, root_certificates: Path | None, home: Path) -> Iterator[SuperLink]:
    """A SuperLink that runs already: a connection's name in Flower's own configuration, or HOST:PORT."""
    if not re.search(r":\d+$", superlink):
        if root_certificates is not None:
            raise UserError("--root-certificates goes with --superlink HOST:PORT; a named connection has its own")
        yield SuperLink(superlink, environment())
        return
    if root_certificates is not None and not root_certificates.is_file():
        raise UserError(f"--root-certificates {root_certificates}: there is no such file")
    trust: dict[str, Any] = {"insecure": True}
    if root_certificates is not None:
        trust = {"insecure": False, "root-certificates": str(root_certificates.resolve())}
    configure(home, {"address": superlink, **trust})
    host, _, port = superlink.rpartition(":")
    yield SuperLink(NAME, environment(home), address=(host.strip("[]"), int(port)))


@contextmanager
def simulating(home: Path, log: Path, nodes: int) -> Iterator[SuperLink]:
    """A SuperLink that lindt starts on a free port of this machine; Ray simulates its nodes."""
    port = free_port()
    configure(home, {"address": f"127.0.0.1:{port}", "insecure": True})
    command = [
        str(Path(sys.executable).parent / "flower-superlink"),
        *("--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)),
        "--disable-runtime-dependency-installation",
    ]
    env = environment(home)
    with guarded(command, env, log) as process:
        wait_for(port, process, log)
        size = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-log-to-driver=false"
        yield SuperLink(NAME, env, ("--federation-config", size), ("127.0.0.1", port))


@contextmanager
def guarded(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that ends with the block or with this process, together with its descendants (guard.py)."""
    theirs, ours = os.pipe()
    guard = [sys.executable, "-m", "lindt.engines.flower.guard", str(theirs), *command]
    with log.open("ab") as said, closing_descriptor(ours):
        with closing_descriptor(theirs):
            # In a session of its own, so that only this process gets Ctrl-C.
            process = subprocess.Popen(
                guard, env=env, stdout=said, stderr=said, start_new_session=True, pass_fds=[theirs]
            )
        try:
            yield process
        finally:
            with suppress(BrokenPipeError):  # it has ended by itself
                os.write(ours, b".")
            process.wait()


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def configure(home: Path, connection: dict[str, Any]) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": NAME, NAME: connection}}))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        if process.poll() is not None:
            raise UserError(f"flower-superlink ended at its start; see {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise UserError(f"flower-superlink did not answer within {seconds:g} s; see {log}")


def end(process: subprocess.Popen[bytes], patience: float = 10) -> None:
    """End a process and its descendants: terminate it first, then kill the descendants that are left."""
    mine = family(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    kill(mine)
    process.wait()


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """A process and its descendants. Flower starts some in sessions of their own, so no process group has all."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
