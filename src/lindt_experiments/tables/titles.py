"""The titles of tasks, methods and environments in tables. Never imports torch."""

from __future__ import annotations

TASK_TITLES = {"cifar": "CIFAR", "shake": "SHAKE"}
METHOD_TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "trimmed-mean": "TrimmedMean",
    "fb": "FB",
    "apfl": "APFL",
    "lindt": "LINDT",
    "lindt-tm": "LINDT-TM",
    "lindt-before": "LINDT, attached before activations (ours)",
    "apfl-own": "APFL, v on its own loss",
    "fl-guard": "FL-GUARD",
    "guarded-all": "guarded-all",
    "fedavg-gain": "FedAvg, clients report gains",
    "guarded": "LINDT, guarded (ours)",
    "runtime": "run-time LINDT, persisting",
    "runtime-once": "run-time LINDT, everyone once",
    "runtime-quiet": "run-time LINDT, until quiet",
    "dual-head": "only v's head trains",
    "separate": "v alone, no attaching",
}
WORLD_TITLES = {
    "normal": "normal FL",
    "iid": "IID",
    "classes-10": "non-IID(10)",
    "classes-5": "non-IID(5)",
    "classes-2": "non-IID(2)",
    "balanced": "balanced",
    "lifted": "attacks end",
    **{f"active-{rate}": f"K/N {float(rate):.0%}" for rate in ("0.9", "0.7", "0.5", "0.3")},
    **{f"attack-{share}": f"attack {float(share):.0%}" for share in ("0", "0.1", "0.33")},
    **{f"sigma-{sigma}": f"sigma {sigma}" for sigma in ("0.003", "0.005", "0.007", "0.01")},
}
# The title of the default NFL environment in a table that varies one of its settings.
STARRED: dict[int | tuple[str, str], str] = {
    4: "Mixed*",
    5: "K/N 10%*",
    6: "attack 20%*",
    7: "sigma 0.001*",
    10: "by role*",
    11: "K/N 10%*",
    12: "attack 16%*",
    13: "sigma 0.001*",
    ("alone", "cifar"): "Mixed*",
    ("alone", "shake"): "by role*",
}
