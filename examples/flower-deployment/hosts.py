"""The processes of a deployment on this machine: one SuperLink, some SuperNodes, each as on a host of its own.

Every process is ended by its own id, together with its child processes; no other process is ended.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from certificates import make_certificates, make_node_key

from lindt.engines.flower.superlink import end, environment, family, free_port, kill

BIN = Path(sys.executable).parent


@dataclass
class Deployment:
    """A folder with certificates, keys, logs, and one folder per host; and the processes started from it."""

    folder: Path
    port: int = field(default_factory=free_port)
    superlink: subprocess.Popen[bytes] | None = None
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = self.folder / "keys"
        make_certificates(self.keys)
        connection = {"address": self.address, "root-certificates": str(self.keys / "ca.crt"), "insecure": False}
        home = self.folder / "operator"
        home.mkdir()
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "here", "here": connection}}))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> None:
        """Start it with TLS, for nodes with a registered key only. Its database keeps them over a restart."""
        keys, home = self.keys, self.folder / "server"
        command = [
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"),
            *("--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"),
            *("--database", home / "state.db", "--disable-runtime-dependency-installation"),
        ]
        self.superlink = self._start("superlink", command, home)
        trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"https://{self.address}/health", timeout=2, context=trusted):
                    return
            except OSError:
                time.sleep(0.1)
                if self.superlink.poll() is not None:
                    break
        raise RuntimeError(f"the SuperLink did not start; see {self.folder / 'superlink.log'}")

    def register(self, name: str) -> None:
        """Register a node's public key, as the operator does once for each node."""
        key = make_node_key(self.keys, name)
        self.flwr("supernode", "register", str(key.with_suffix(".pub")), "here")

    def flwr(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *words], env=environment(self.folder / "operator"), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_node(self, name: str, clients: str, *extra: str, key: str | None = None) -> subprocess.Popen[bytes]:
        """Start a host with its own home, its clients' data and v_i. `extra` are further entries of its node config."""
        keys, home = self.keys, self.folder / name
        config = " ".join([f'clients="{clients}"', f'private="{home / "private"}"', *extra])
        command = [
            *("flower-supernode", "--superlink", self.address, "--root-certificates", keys / "ca.crt"),
            *("--auth-supernode-private-key", keys / (key or name), "--node-config", config),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"),
            *("--ssl-keyfile", keys / "server.key"),
        ]
        self.nodes[name] = self._start(name, command, home)
        return self.nodes[name]

    def restart_node(self, name: str, clients: str, *extra: str, seconds: float = 150) -> None:
        """Start a node until it is accepted, as a supervisor does. The lease of a killed node has to end before."""
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            log, process = self.folder / f"{name}.log", self.start_node(name, clients, *extra)
            already = log.read_text().count("SuperNode ID")
            while process.poll() is None:
                if log.read_text().count("SuperNode ID") > already:
                    return
                time.sleep(0.2)
            time.sleep(3)
        raise RuntimeError(f"{name} was not accepted again; see {log}")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its child processes with SIGKILL, like a power cut."""
        kill(family(process.pid))
        process.wait()

    def stop(self) -> None:
        """Stop the processes that were started here, and their child processes: first by SIGTERM, then by SIGKILL."""
        for process in (*self.nodes.values(), self.superlink):
            if process is not None and process.poll() is None:
                end(process, patience=5)

    def _start(self, name: str, command: list[str | Path], home: Path) -> subprocess.Popen[bytes]:
        home.mkdir(parents=True, exist_ok=True)
        env = environment(home) | {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(BIN / command[0]), *map(str, command[1:])],
                env=env,
                cwd=home,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
