"""Every field of a plan: what it means, its default and its choices, for `lindt plan` and docs/plan-fields.md.

Names, types and defaults are read from the dataclasses. MEANINGS holds one line for each field, by class and name.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from lindt.data.sources import SOURCES, Text
from lindt.plan.file import to_dict
from lindt.plan.plan import METHODS, Plan
from lindt.protocols import Metric
from lindt.registry import is_protocol, kind_of, kinds

WEIGHT_DECAY: Final = "the factor of the L2 penalty on the weights"
BETAS: Final = "the factors of the running means of the gradient and of its square"
EPS: Final = "a small number in the denominator"
SHARE: Final = "the share of the clients that attack"
FLOOR: Final = "the fewest training samples of a client"
SPREAD: Final = "how much sizes differ: the sigma of a log-normal draw"
FIRST: Final = "how a client's own model begins: as a copy of w, or drawn at random"

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "Plan": {
        "name": "the name of the run, and of its folder",
        "seed": "the seed of everything that is drawn at random",
        "rounds": "the number of rounds",
        "threads": "threads of a worker; other numbers give other last bits",
        "data": "the data and their allocation to clients",
        "model": "the model that is trained; with a task of your own, the task's model is used",
        "training": "a client's training in a round",
        "environment": "the clients that take part, the attack, and the privacy noise",
        "method": "how clients adapt the model, how the server joins their updates, and when recovery runs",
        "alone": "the private models P_i, each trained on one client's data, that the federation is compared with",
        "scoring": "which rounds are scored, and how",
        "detection": "the test that says whether federation helps or hurts",
        "early_stop": "when a run ends before its last round",
    },
    "EarlyStop": {
        "patience": "the run ends after so many scored rounds without a better validation score; 0: it never ends early"
    },
    "Data": {
        "source": "the data set",
        "clients": "N, the number of clients",
        "test_share": "the share of samples for testing, where the data set has no test part of its own",
        "allocation": "how the samples are divided among the clients",
        "text": "how a text becomes samples, where the data set is a text",
    },
    "Text": {
        "window": "characters of an input; the target is the next character",
        "stride": "characters from one sample to the next",
        "split": "blocked: the end of each text is for testing; shuffled: windows for testing are drawn, and overlap",
    },
    "Training": {
        "rate": "eta, the learning rate in round 1",
        "decay": "the factor on the learning rate after each round",
        "epochs": "E, the epochs over a client's data in a round",
        "batch": "B, the samples of a batch",
        "max_norm": "the bound on the L2 norm of a gradient",
        "optimizer": "the optimizer of the clients' steps",
        "accumulate": "the number of batches per step",
    },
    "Environment": {
        "participation": "the clients that are asked in a round",
        "threat": "the attack of some clients",
        "privacy": "the clipping of updates and the noise on their mean",
    },
    "Method": {
        "adaptation": "how a client trains a model of its own while recovery is on",
        "aggregator": "how the server joins the updates",
        "penalty": "a term that is added to the loss of w",
        "recovery": "when recovery is on",
        "after_stop": "how clients predict after recovery has stopped: with their adapted models, or with w",
    },
    "Alone": {
        "private": "whether private models are trained",
        "epochs": "the most epochs of a private model",
        "patience": "epochs below the best score after which the search for the number of epochs ends",
        "held_out": "the share of a client's training data on which the number of epochs is chosen",
        "refit": "whether the model is then trained on all of the client's training data",
        "stretch": "the factor on the chosen number of epochs in the refit",
        "with_validation": "whether scores compare with a second private model, trained on the validation part V_i too",
    },
    "Scoring": {
        "every": "one round in so many is scored",
        "last": "the number of last rounds that are all scored; the result is their mean",
        "metric": "the score of a model; a metric of your own is given with the task",
        "weighting": "how clients count in a mean: equally, by their number of samples, or as `weights` says",
        "weights": "one weight for each client, where weighting is given",
        "attackers": "whether the scores of attackers count",
        "panel": "clients that are scored, drawn at random; 0: all, of more than 100,000 clients a panel of 1,000",
    },
    "Sgd": {
        "momentum": "the factor on the step before, which is added to a step",
        "nesterov": "whether the momentum is Nesterov's",
        "weight_decay": WEIGHT_DECAY,
    },
    "Adam": {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
    "Adamw": {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
    "Iid": {"floor": FLOOR},
    "Classes": {"per_client": "classes that a client holds", "spread": SPREAD, "floor": FLOOR},
    "Groups": {
        "clients": "the number of clients in each group",
        "classes": "the classes that a client of each group holds",
        "spread": SPREAD,
        "floor": FLOOR,
    },
    "Dirichlet": {"alpha": "small: few classes per client; large: similar clients", "floor": FLOOR},
    "Roles": {"floor": FLOOR, "least": "the fewest samples of a role that counts"},
    "Balanced": {"floor": FLOOR, "least": "the fewest samples of a role that counts"},
    "Sampled": {
        "rate": "the share of the clients that is asked in a round, where active_clients is 0",
        "active_clients": "K, the number of clients that are asked in a round; 0: by rate",
        "over_select": "the number of clients asked in addition to K; the first K answers count",
    },
    "Gaussian": {
        "S": "the bound on the L2 norm of an update",
        "sigma": "the standard deviation of the noise on the mean of the updates",
    },
    "Gain": {
        "alpha": "the level of the test, for the whole run",
        "combine": "how the reports of a round are combined",
        "start": "the first round that the test counts; 0: chosen by the number of rounds",
        "noise": "the scale of the Laplace noise that a client adds to each number of its report",
        "panel": "the share of the clients that train a private model and report",
    },
    "FlGuard": {
        "c": "the number of rounds of the mean gain; 0: a tenth of the rounds",
        "nr": "the tolerated number of negative rounds; 0: a tenth of the rounds",
    },
    "OnDetection": {
        "epsilon": "the threshold of the statistic; a round above it counts",
        "patience": "r': recovery begins when more than so many rounds count",
        "statistic": "the number that is compared with epsilon",
        "counting": "whether all rounds above epsilon count, or only consecutive ones",
        "stop": "when recovery ends",
        "again": "after a stop: rearm allows a new detection, once leaves recovery off",
    },
    "OnEvidence": {"start": "whether recovery begins at the early warning or at the verdict"},
    "QuietRounds": {"rounds": "the number of consecutive rounds below epsilon that end recovery"},
    "WeightedMean": {"most": "the largest number of samples that counts for a client"},
    "TrimmedMean": {"share": "the share of the values that is dropped at each end"},
    "Krum": {"share": "the share of the clients that may be hostile"},
    "MultiKrum": {"share": "the share of the clients that may be hostile"},
    "GeometricMedian": {"steps": "the most steps of the iteration", "tolerance": "the relative change that ends it"},
    "NormBound": {"factor": "the bound on an update's norm, in median norms"},
    "Proximal": {"mu": "the weight of the squared distance to the received w"},
    "Apfl": {
        "alpha": "the weight of the private model in the mixture",
        "mix": "whether predictions or weights are mixed",
        "v_loss": "the loss that v_i trains on: that of the mixture, or its own",
        "first": FIRST,
    },
    "Ditto": {"pull": "the weight of the squared distance between v_i and w"},
    "Dual": {
        "points": "submodules at which the models are joined; empty: the model's own",
        "scale": "how the score of two representations is computed",
        "position": "whether the points are after or before the activations",
        "first": FIRST,
        "trains": "whether all of v_i trains, or only its last layer",
    },
    "FedAla": {
        "layers": "the number of top layers that are mixed element by element",
        "sample": "the share of the client's data on which the mixture is learned",
        "eta": "its learning rate",
    },
    "FineTune": {
        "rate": "the learning rate",
        "epochs": "epochs over the client's data",
        "kept": "whether the model is tuned in training and stored, or tuned for each prediction",
    },
    "FineTuneHead": {
        "rate": "the learning rate",
        "epochs": "epochs over the client's data",
        "batch": "the samples of a batch",
        "head": "the submodule that is tuned; empty: the last layer",
    },
    "Guarded": {
        "adaptation": "how a client trains a model of its own",
        "members": "the models that are mixed",
        "combine": "whether probabilities or outputs are mixed, or one model is picked",
        "strength": "how much the weights depend on the validation data; `0`: sqrt(2 ln M / n), M models, n samples",
        "tuning_rate": "the rate of the member `tuned`",
        "tuning_epochs": "the epochs of the member `tuned`",
    },
    "PartialSharing": {
        "private": "layers that stay with the client",
        "shared": "layers that are sent, where private is empty; both empty: all but the last layer",
        "training": "whether private and shared layers train together or in turn, or only the shared layers",
        "epochs": "epochs of the private layers, where they train in turn or for each prediction",
        "rate": "their learning rate; 0: that of the plan",
    },
    "Separate": {"first": FIRST},
    "Backdoor": {
        "share": SHARE,
        "relabel": "pairs of a true class and its false label",
        "epochs": "epochs of an attacker in a round",
        "per_batch": "the number of falsely labelled samples in a batch",
    },
    "NextCharacter": {
        "share": SHARE,
        "label": "the false label of every next character",
        "epochs": "epochs of an attacker in a round",
    },
    "Until": {"last_round": "the last round with an attack", "threat": "the attack"},
    "SignFlip": {"share": SHARE, "factor": "the factor on the update"},
    "AdditiveNoise": {"share": SHARE, "factor": "the norm of the noise, in norms of the update"},
    "FreeRider": {"share": SHARE},
    "Colluding": {
        "share": SHARE,
        "factor": "the factor on the norm of the update",
        "agreed": "the seed of the direction that the attackers agreed on",
    },
    "LabelFlip": {"share": SHARE, "classes": "the number of classes C; label c is replaced by C - 1 - c"},
    "ModelReplacement": {"factor": "the factor on the update", "threat": "the attack that computes the update"},
    "InnerProduct": {"share": SHARE, "epsilon": "the factor on the mean of the honest updates, before the minus sign"},
    "LittleIsEnough": {"share": SHARE, "z": "standard deviations below the honest mean; 0: the paper's z"},
    "MinMax": {"perturbation": "the direction of the perturbation", "share": SHARE},
    "Sybils": {"threat": "the attack that the first of them computes"},
    "Cnn": {
        "dropout": "the share of units that are dropped in training",
        "side": "the side of a picture, in pixels",
        "kernel": "the side of a convolution, in pixels",
        "channels": "the channels of the two convolutions",
        "units": "the units of the two hidden layers",
        "inputs": "the channels of a picture",
    },
    "Lstm": {"hidden": "the units of each LSTM", "dropout": "the share of units that are dropped in training"},
    "Linear": {"features": "the number of inputs"},
    "Mlp": {"features": "the number of inputs", "hidden": "the units of the hidden layer"},
}
# Texts for components whose docstring does not begin with a description.
KINDS: Final = {
    "dual": "LINDT's dual model (Eq. 8 to 10): w_i and v_i train together, joined where their representations agree.",
    "apfl": "A private model, trained and used in a fixed mixture with w.",
    "gaussian": "Updates are clipped to S, and noise N(0, sigma^2 I) is added to their mean.",
    "no_privacy": "No clipping and no noise.",
    "no_threat": "No client attacks.",
    "no_penalty": "The loss alone.",
    "accuracy": "The share of samples whose largest output is the label's.",
}
_ENDS: Final = re.compile(r"(?<!\bal)(?<!\bEq)(?<!\bAlg)(?<!\bSec)\. (?=[A-Z`])")  # of a sentence
_WORDS: Final = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@final
@dataclass(frozen=True)
class PlanField:
    """One field of a plan: its path, its value, and its meaning, default and choices."""

    path: str
    value: str  # as TOML writes it
    meaning: str
    default: str  # as TOML writes it; empty where the field has to be given
    choices: str

    @property
    def changed(self) -> bool:
        return self.value != self.default


def plan_fields(plan: Plan) -> Iterator[PlanField]:
    """Every field of a plan with its value, those of the chosen components too."""
    yield from _fields(plan, "", Plan())


def _fields(owner: Any, path: str, default: Any) -> Iterator[PlanField]:
    """The fields of `owner`. `default` is its default; a component of another kind has its own defaults."""
    hints = typing.get_type_hints(type(owner))
    for field in _set(type(owner)):
        value, where = getattr(owner, field.name), f"{path}.{field.name}" if path else field.name
        at_first = getattr(default, field.name) if type(default) is type(owner) else default_of(field)
        if is_protocol(hints[field.name]):
            found, usual = (json.dumps(kind_of(one)) if one is not None else "" for one in (value, at_first))
            meaning = meaning_of(type(owner), field.name)
            yield PlanField(where, found, meaning, usual, choices_of(hints[field.name], where))
            yield from _fields(value, where, at_first)
        elif dataclasses.is_dataclass(value):
            yield from _fields(value, where, at_first)
        else:
            usual = "" if at_first is None else in_toml(at_first)
            meaning = meaning_of(type(owner), field.name)
            yield PlanField(where, in_toml(value), meaning, usual, choices_of(hints[field.name], where))


def _set(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def meaning_of(cls: type, name: str) -> str:
    """The meaning of a field; empty for a component of the user's own."""
    return MEANINGS.get(cls.__name__, {}).get(name, "")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; None where the field has to be given."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def in_toml(value: Any) -> str:
    """A value as written in a plan; texts, lists, numbers and booleans are the same in JSON and TOML."""
    return json.dumps(to_dict(value))


def choices_of(hint: Any, path: str) -> str:
    """The allowed values of a field, as text."""
    if path == "data.source":
        return " | ".join(sorted(SOURCES))
    if path == "scoring.metric":
        return " | ".join(sorted(kinds(Metric)))
    if is_protocol(hint):
        return " | ".join(sorted(kinds(hint)))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(inner)
    if origin is tuple:
        return f"a list, each {choices_of(inner[0], '')}"
    if isinstance(hint, types.GenericAlias) or hint not in _WORDS:
        return "a table"
    return _WORDS[hint]


def fields_page() -> str:
    """docs/plan-fields.md: the fixed tables, then each choice of a component with its fields."""
    lines = [
        "# The fields of a plan",
        "",
        "`lindt plan PLAN` prints the fields of one plan with their values, `lindt plan PLAN --toml` the plan itself.",
        "`--set FIELD=VALUE` sets one: `--set environment.privacy.sigma=0.003`. A component is chosen by its kind,",
        '`aggregator = "median"`, or as a table with its fields, `aggregator = {kind = "trimmed_mean", share = 0.1}`.',
        f"`method` may be a name: {', '.join(f'`{name}`' for name in METHODS)}.",
        "A plan without `method` has `watch`: detection only.",
        "",
        "This page is written by `python tests/plan/test_fields.py`.",
        "",
    ]
    protocols: dict[Any, str] = {}
    for path, cls in _tables():
        lines += [f"## {path or 'The plan'}", "", *_rows(cls, path, protocols), ""]
    waiting = list(protocols)
    for protocol in waiting:  # grows: a component may hold another
        lines += [f"## {protocols[protocol]}", ""]
        for kind, cls in sorted(kinds(protocol).items()):  # the order of imports is not always the same
            lines += [f"`{kind}`: {_about(kind, cls)}", ""]
            if dataclasses.is_dataclass(cls) and _set(typing.cast(type, cls)):
                lines += [*_rows(typing.cast(type, cls), "", protocols), ""]
        waiting += [found for found in protocols if found not in waiting]
    return "\n".join(lines)


def _tables() -> Iterator[tuple[str, type]]:
    yield "", Plan
    for name, hint in typing.get_type_hints(Plan).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield name, hint
    yield "data.text", Text


def _rows(cls: type, path: str, protocols: dict[Any, str]) -> list[str]:
    hints = typing.get_type_hints(cls)
    found = ["| field | meaning | default | choices |", "|---|---|---|---|"]
    for field in _set(cls):
        where = f"{path}.{field.name}" if path else field.name
        hint, default = hints[field.name], default_of(field)
        choices = choices_of(hint, where)
        if is_protocol(hint):
            protocols.setdefault(hint, where)
            shown, choices = ("" if default is None else kind_of(default)), f"a kind of {protocols[hint]}, below"
        elif dataclasses.is_dataclass(hint):
            shown, choices = "", f"the table {where}, below"
        else:
            shown = "" if default is None else in_toml(default)
        found.append(f"| `{where}` | {meaning_of(cls, field.name)} | {shown and f'`{shown}`'} | {_cell(choices)} |")
    return found


def _cell(text: str) -> str:
    return text.replace(" | ", ", ")


def _about(kind: str, cls: Any) -> str:
    """The first sentence of a component's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split())
    if kind in KINDS or text.startswith(f"{getattr(cls, '__name__', '')}("):
        return KINDS.get(kind, "")
    first = _ENDS.split(text, maxsplit=1)[0].rstrip(".")
    return f"{first}." if first else ""
