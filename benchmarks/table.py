"""The results as table and figure of docs/performance.md; `python benchmarks/table.py RESULTS` draws them again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO

from lockstep import QUIET
from work import GFLOP

NAMES = {
    "sgemm2": "floor: the same FLOP as sgemm, 2 processes",
    "sgemm1": "the same FLOP as sgemm, 1 process",
    "ours2": "**lindt**, 2 workers",
    "ours1": "**lindt**, in process, 1 thread",
    "plain2p": "plain PyTorch loop, 2 processes",
    "pfl2p": "pfl-research, 2 processes (gloo)",
    "flower": "Flower simulation, Ray, 2 actors",
    "plain2t": "plain PyTorch loop, 2 threads",
    "pfl2t": "pfl-research, 2 threads",
    "fedjax": "fedjax, 2 cores",
    "plain1": "plain PyTorch loop, 1 thread",
    "dual2": "**lindt**, the dual round, 2 workers",
    "dual1": "**lindt**, the dual round, in process",
}
PAIRS = (
    ("CNN round: plain loop, 1 thread / lindt, 2 workers", "plain1", "ours2", "at least 2.3"),
    ("CNN round: Flower / lindt, 2 workers", "flower", "ours2", "at least 1.4"),
    ("CNN round: pfl-research, 2 threads / lindt, 2 workers", "pfl2t", "ours2", "at least 1.8"),
    ("CNN round: pfl-research, 2 processes / lindt, 2 workers", "pfl2p", "ours2", ""),
    ("CNN round: fedjax / lindt, 2 workers", "fedjax", "ours2", ""),
    ("CNN round: plain loop, 2 processes / lindt, 2 workers", "plain2p", "ours2", ""),
    ("share of the sgemm peak, lindt, 2 workers", "sgemm2", "ours2", "at least 0.48"),
    ("dual round / single round, 2 workers", "dual2", "ours2", "at most 2.25"),
    ("dual round / single round, in process", "dual1", "ours1", "at most 2.25"),
    ("LSTM: plain loop, 1 thread / lindt, 2 workers", "lstm_plain1", "lstm_ours2", "at least 2.0"),
    ("LSTM: plain loop, 1 thread / lindt, in process", "lstm_plain1", "lstm_ours1", ""),
    ("evaluation of 10,000: plain loop, 1 thread / lindt, in process", "evaluation_plain1", "evaluation_ours1", ""),
    ("evaluation of 10,000: plain loop, 1 thread / lindt, 2 workers", "evaluation_plain1", "evaluation_ours2", ""),
)


LARGE = {"resnet": "ResNet-18 with GroupNorm", "transformer": "transformer"}
WAYS = {
    "ours2": "**lindt**, 2 workers",
    "pfl2p": "pfl-research, 2 processes (gloo)",
    "plain2p": "plain PyTorch loop, 2 processes",
    "flower": "Flower simulation, Ray, 2 actors",
    "ours1": "**lindt**, in process, 1 thread",
    "plain1": "plain PyTorch loop, 1 thread",
    "dual2": "**lindt**, the dual round, 2 workers",
    "dual1": "**lindt**, the dual round, in process",
}
LARGE_PAIRS = (
    ("plain loop, 1 thread / lindt, 2 workers", "plain1", "ours2", "at least 1.3"),
    ("plain loop, 2 processes / lindt, 2 workers", "plain2p", "ours2", "at least 1"),
    ("Flower / lindt, 2 workers", "flower", "ours2", "at least 1"),
    ("pfl-research, 2 processes / lindt, 2 workers", "pfl2p", "ours2", "at least 1"),
    ("plain loop, 1 thread / lindt, in process", "plain1", "ours1", ""),
    ("dual round / single round, 2 workers", "dual2", "ours2", "at most 2.1"),
    ("dual round / single round, in process", "dual1", "ours1", "at most 2.1"),
)


def seconds(found: dict[str, Any], key: str) -> list[float]:
    return list(found["contestants"][key]["seconds"].values())


def ratios(found: dict[str, Any], above: str, below: str, clock: str = "seconds") -> list[float]:
    """The ratios within each pass in which both took part; `clock` is seconds or cpu."""
    a, b = (found["contestants"][key][clock] for key in (above, below))
    return [a[number] / b[number] for number in a if number in b]


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and the quartiles (of fewer than four values, the extremes)."""
    low, high = (min(values), max(values)) if len(values) < 4 else quantiles(values, n=4, method="inclusive")[::2]
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def write_table(found: dict[str, Any], out: TextIO) -> None:
    if any(key in NAMES for key in found["contestants"]):
        _write_cnn(found, out)
    for work in LARGE:
        if any(key.startswith(f"{work}_") for key in found["contestants"]):
            _write_large(found, work, out)
    if found["probes"]:
        _write_probes(found, out)
    others = [share for one in found["contestants"].values() for share in one["others"].values()]
    out.write(
        f"\nOther work took {spread([100 * share for share in others], 0)}% of the cores during a round, more than a "
        f"tenth in {sum(share > QUIET for share in others)} of {len(others)} rounds; "
        f"load average before the run {found['load before'][0]:.2f}.\n"
    )


def _write_large(found: dict[str, Any], work: str, out: TextIO) -> None:
    """The round of a large model by wall clock and by processor time, which other work on the machine changes less."""
    there = found["contestants"]
    keys = [key for key in WAYS if f"{work}_{key}" in there]
    keys.sort(key=lambda key: median(seconds(found, f"{work}_{key}")))
    size = max(there[f"{work}_{key}"]["parameters"] for key in keys)
    out.write(f"\n{LARGE[work]}, {size:,} parameters:\n\n")
    out.write("| way | s a round | processor seconds | first round, s | passes |\n|---|---|---|---|---|\n")
    for key in keys:
        one = there[f"{work}_{key}"]
        cpu = spread(list(one["cpu"].values()))
        passes = len(one["seconds"])
        out.write(
            f"| {WAYS[key]} | {spread(seconds(found, f'{work}_{key}'))} | {cpu} | {one['first']:.1f} | {passes} |\n"
        )
    out.write("\n| ratio, within a pass | seconds | processor seconds | bar |\n|---|---|---|---|\n")
    for name, above, below, bar in LARGE_PAIRS:
        pair = f"{work}_{above}", f"{work}_{below}"
        if pair[0] in there and pair[1] in there and (values := ratios(found, *pair)):
            out.write(f"| {name} | {spread(values)} | {spread(ratios(found, *pair, clock='cpu'))} | {bar} |\n")


def _write_cnn(found: dict[str, Any], out: TextIO) -> None:
    there = found["contestants"]
    out.write("| way | s a round | times the plain loop's speed | of the sgemm peak | first round, s | passes |\n")
    out.write("|---|---|---|---|---|---|\n")
    rows = sorted((key for key in NAMES if key in there), key=lambda key: median(seconds(found, key)))
    for key in rows:
        speed = spread(ratios(found, "plain1", key)) if "plain1" in there else ""
        peak = f"{median(ratios(found, 'sgemm2', key)):.0%}" if "sgemm2" in there else ""
        first = f"{there[key]['first']:.1f}"
        out.write(f"| {NAMES[key]} | {spread(seconds(found, key))} | {speed} | {peak} | {first} | {len(seconds(found, key))} |\n")  # fmt: skip  # noqa: E501
    if "sgemm2" in there:
        peak = GFLOP / median(seconds(found, "sgemm2"))
        alone = f", {GFLOP / median(seconds(found, 'sgemm1')):.0f} on one" if "sgemm1" in there else ""
        out.write(f"\nsgemm peak: {peak:.0f} GF/s on two processes{alone}.\n")
    out.write("\n| ratio, within a pass | median (quartiles) | min, max | bar |\n|---|---|---|---|\n")
    for name, above, below, bar in PAIRS:
        if above in there and below in there and (values := ratios(found, above, below)):
            out.write(f"| {name} | {spread(values)} | {min(values):.2f}, {max(values):.2f} | {bar} |\n")


def _write_probes(found: dict[str, Any], out: TextIO) -> None:
    probes, single = found["probes"], median(seconds(found, "ours2"))
    out.write(
        f"\nDetection on 10 x 940,362: {1000 * probes['detection']:.1f} ms, "
        f"{probes['detection'] / single:.2%} of a round of 2 workers.\n"
    )
    for name in found["contestants"]:
        if name.startswith(("lstm", "evaluation")):
            out.write(f"{name}: {spread(seconds(found, name))} s. ")
    out.write("\nStart-up: " + ", ".join(f"`{name}` {took:.2f} s" for name, took in probes["start-up"].items()) + ".\n")
    out.write("\n| grows with | points: s a round, MB | slope of seconds | slope of MB |\n|---|---|---|---|\n")
    for letter, grown in probes["growth"].items():
        points = "; ".join(
            f"{letter} = {size:,}: {point['seconds']:.3f}, {point['megabytes']:.0f}" for size, point in grown["points"]
        )
        out.write(f"| {letter} | {points} | {grown['slope of seconds']:.2f} | {grown['slope of megabytes']:.2f} |\n")


def figure(found: dict[str, Any], to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lindt"
    from matplotlib import pyplot as plt

    keys = [key for key in NAMES if not key.startswith(("sgemm", "dual"))]
    keys.sort(key=lambda key: -median(seconds(found, key)))
    middles = [median(seconds(found, key)) for key in keys]
    lows = [middle - min(seconds(found, key)) for key, middle in zip(keys, middles, strict=True)]
    highs = [max(seconds(found, key)) - middle for key, middle in zip(keys, middles, strict=True)]
    drawing, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    colours = ["#2a6f97" if key.startswith("ours") else "#b8b8b8" for key in keys]
    axes.barh([NAMES[key].replace("**", "") for key in keys], middles, xerr=[lows, highs], color=colours, capsize=3)
    floor = median(seconds(found, "sgemm2"))
    axes.axvline(floor, color="black", linestyle=":", linewidth=1)
    axes.text(floor, len(keys) - 0.4, " sgemm peak", fontsize=8, va="bottom")
    axes.set_xlabel("seconds a round of the paper's CNN: median, min to max")
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(to, metadata={"Date": None})


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text())
    write_table(read, sys.stdout)
    figure(read, Path(__file__).resolve().parent.parent / "docs" / "performance.svg")
