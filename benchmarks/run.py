"""`make bench`: lindt and its peers on the same work, in alternation. `--smoke`: a tiny pass, to test the scripts."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from lockstep import HERE, Contestant, Patience, others_now, play

TWO = ("--workers", "2")

ROUND = (
    Contestant("plain1", "plain.py"),
    Contestant("plain2t", "plain.py", ("--threads", "2")),
    Contestant("plain2p", "plain.py", ("--processes", "2")),
    Contestant("flower", "flower.py", peer="flower"),
    Contestant("pfl2t", "pfl_research.py", peer="pfl"),
    Contestant("pfl2p", "pfl_research.py", ("--processes", "2"), peer="pfl"),
    Contestant("fedjax", "fedjax_peer.py", peer="fedjax"),
    Contestant("ours1", "ours.py"),
    Contestant("ours2", "ours.py", TWO),
    Contestant("dual2", "ours.py", ("--method", "lindt-always", *TWO)),
    Contestant("dual1", "ours.py", ("--method", "lindt-always"), every=3),
    Contestant("sgemm1", "sgemm.py", every=3),
    Contestant("sgemm2", "sgemm.py", ("--processes", "2")),
)
LSTM = (
    Contestant("lstm_plain1", "plain.py", ("--work", "lstm")),
    Contestant("lstm_ours1", "ours.py", ("--work", "lstm")),
    Contestant("lstm_ours2", "ours.py", ("--work", "lstm", *TWO)),
)
EVALUATION = (
    Contestant("evaluation_plain1", "plain.py", ("--work", "evaluation")),
    Contestant("evaluation_ours1", "ours.py", ("--work", "evaluation")),
    Contestant("evaluation_ours2", "ours.py", ("--work", "evaluation", *TWO)),
)


def large(work: str) -> tuple[Contestant, ...]:
    """The contestants of a round of a large model, by processes: a set-up on threads is slower for each of them."""
    named, method = ("--work", work), ("--method", "lindt-always")
    return (
        Contestant(f"{work}_plain1", "plain.py", named),
        Contestant(f"{work}_plain2p", "plain.py", (*named, "--processes", "2")),
        Contestant(f"{work}_flower", "flower.py", named, peer="flower"),
        Contestant(f"{work}_pfl2p", "pfl_research.py", (*named, "--processes", "2"), peer="pfl"),
        Contestant(f"{work}_ours1", "ours.py", named),
        Contestant(f"{work}_ours2", "ours.py", (*named, *TWO)),
        Contestant(f"{work}_dual1", "ours.py", (*named, *method), every=3),
        Contestant(f"{work}_dual2", "ours.py", (*named, *method, *TWO)),
    )


LARGE = {work: large(work) for work in ("resnet", "transformer")}
SMOKE = ("plain1", "ours1", "ours2", "dual2", "lstm_ours2", "transformer_dual1")
PARTS = {"cnn": ROUND, "lstm": LSTM, "evaluation": EVALUATION, **LARGE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait in all for a quiet machine")
    parser.add_argument(
        "--part", nargs="*", choices=PARTS, help="measure these contestants alone, and keep the numbers"
    )
    parser.add_argument("--only", nargs="*", help="keys of contestants, for a quick look: nothing is written")
    options = parser.parse_args()
    if options.smoke:
        os.environ["LINDT_BENCH_SAMPLES"] = "20"
        smoke()
        return
    from table import figure, write_table

    found = measure(options.passes, options.only, options.part, Patience(options.patience))
    if options.only:
        write_table(found, sys.stdout)
        return
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    words = found["machine"]["processor"].lower().split()
    part = f"-{'-'.join(options.part)}" if options.part else ""
    kept = results / f"{found['date'][:10]}-{'-'.join(words[:2])}-{found['machine']['cores']}-cores{part}.json"
    kept.write_text(json.dumps(found, indent=1) + "\n")
    write_table(found, sys.stdout)
    sys.stdout.write(f"\nkept in {kept.relative_to(HERE.parent)}\n")
    if not options.part:
        figure(found, HERE.parent / "docs" / "performance.svg")
        sys.stdout.write("drawn in docs/performance.svg\n")


def smoke() -> None:
    from probes import asked

    everyone = [contestant for part in PARTS.values() for contestant in part]
    found = play([contestant for contestant in everyone if contestant.key in SMOKE], 1, Patience(0))
    asked("detection", 3, 1000)
    asked("growth", 20, 5, 1000)
    for key, one in found.items():
        sys.stdout.write(f"{key:<12} ran, {one.parameters:,} parameters, {one.seconds[0]:.2f} s\n")


def measure(passes: int, only: list[str] | None, parts: list[str] | None, patience: Patience) -> dict[str, object]:
    from probes import SWEEPS, asked, start_up

    load, others, measured = os.getloadavg(), others_now(2.0), revision()
    contestants = {}
    for name, group in PARTS.items():
        chosen = [c for c in group if (not only or c.key in only) and (not parts or name in parts)]
        if chosen:
            count = min(passes, 3) if name == "evaluation" else passes
            contestants |= {key: asdict(one) for key, one in play(chosen, count, patience).items()}
    probes: dict[str, object] = {}
    if not only and not parts:
        from probes import sweep

        sys.stderr.write("  detection, start-up, growth\n")
        probes["detection"] = asked("detection", 10, 940_362)["seconds"]
        probes["start-up"] = start_up()
        probes["growth"] = {letter: sweep(letter) for letter in SWEEPS}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "revision": measured,  # as it was when the contestants were started
        "load before": load,
        "others' share of the cores before": others,
        "contestants": contestants,
        "probes": probes,
    }


def revision() -> str:
    """The commit of the measured code, with "+" if there are changes that are not committed."""
    asked = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, object]:
    """The properties of the machine that the numbers depend on, without names."""
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in told.splitlines() if line.startswith("model name")]
    vectors = [name for name in ("avx512f", "avx2", "avx") if name in told.split()]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": models[0] if models else platform.machine(),
        "vectors": vectors[0] if vectors else "",  # the widest instructions that its kernels may use
        "cores": os.cpu_count(),
        "memory in GB": round(memory, 1),
        "system": platform.system(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
