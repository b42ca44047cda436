"""Fuzz one parser, guided by coverage (atheris): `python tests/torture/fuzz.py plan --seconds 60`.

The fuzzing is done in a process of its own. There memory beyond a bound is refused, so that who asks for it crashes;
and so does whatever writes outside its folder, unpickles, starts a process or connects. An input that crashes, or
takes longer than 20 seconds, is kept in a file.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOM = 1 << 30  # bytes that may be taken beyond what the imports take
SLOWEST = 20  # seconds an input
FORBIDDEN = {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(event: str, details: tuple[Any, ...]) -> None:
    """An audit hook: Python tells it what is about to be done."""
    if event in FORBIDDEN:
        raise AssertionError(f"{event} {details!r}")
    if event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.truncate", "os.rmdir"):
        names = [name for name in details if isinstance(name, str | bytes)]
    elif event == "open" and isinstance(details[2], int) and details[2] & WRITING:
        names = [name for name in details[:1] if isinstance(name, str | bytes)]
    else:
        return
    home = os.path.realpath(tempfile.gettempdir())
    for name in names:
        if not os.path.realpath(os.fsdecode(name)).startswith(home) and os.fsdecode(name) != os.devnull:
            raise AssertionError(f"{event} {name!r} lies outside")


def inside(name: str, seconds: int, kept: str) -> None:
    """Fuzz; libFuzzer ends the process."""
    import atheris

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    with atheris.instrument_imports(include=["lindt"]):
        from fuzz_targets import TARGETS
    target, seeds = TARGETS[name]
    corpus = Path(tempfile.mkdtemp())
    for number, seed in enumerate(seeds()):
        target(seed)  # also: whatever is made once is made before the guard stands
        (corpus / f"seed-{number}").write_bytes(seed)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    warnings.simplefilter("ignore")
    logging.disable()
    os.fsync = lambda _: None  # nothing here has to survive
    sys.addaudithook(guard)
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={SLOWEST}",
        "-rss_limit_mb=0",
        "-max_len=65536",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={kept}/", str(corpus)], target)
    atheris.Fuzz()


def main() -> int:
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("target")
    wanted.add_argument("--seconds", type=int, default=60)
    wanted.add_argument("--kept", type=Path, default=Path("fuzz-crashes"), help="where inputs that crash are kept")
    wanted.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = wanted.parse_args()
    if given.inside:
        inside(given.target, given.seconds, str(given.kept))
    kept = given.kept.resolve() / given.target
    kept.mkdir(parents=True, exist_ok=True)
    before = set(kept.iterdir())
    words = [sys.executable, __file__, given.target, "--seconds", str(given.seconds), "--kept", str(kept), "--inside"]
    with tempfile.TemporaryDirectory(prefix="lindt-fuzz-") as folder:
        environment = os.environ | {"TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, timeout=given.seconds + 300)
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    crashes = sorted(set(kept.iterdir()) - before)
    runs, covered = re.findall(r"^#(\d+)\s", said, re.M), re.findall(r"cov: (\d+)", said)
    failed = bool(crashes) or done.returncode != 0
    if failed:
        sys.stdout.write(said[-6000:] + "\n" + "".join(f"input kept: {path}\n" for path in crashes))
    elif not before:
        kept.rmdir()
    figures = f"executions={runs[-1] if runs else 0} coverage={covered[-1] if covered else 0}"
    sys.stdout.write(f"FIGURE fuzz={given.target} {figures} seconds={given.seconds} crashes={int(failed)}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
