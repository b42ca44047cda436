"""Plans as TOML: there and back, strict about what they hold, and never an error but a sentence."""

from __future__ import annotations

import dataclasses
import datetime
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.training import Proximal, Sgd
from lindt.data.partition import Classes, Groups, Partition
from lindt.environment import Environment
from lindt.environment.participation import Participation, Sampled
from lindt.environment.privacy import Gaussian, Privacy
from lindt.environment.threats import Backdoor, NextCharacter, Threat, Until
from lindt.errors import PlanError, UserError
from lindt.plan.file import from_dict, from_toml, override, resolve, to_dict
from lindt.plan.models import Linear, Lstm, Model
from lindt.plan.plan import METHODS, Alone, Data, EarlyStop, Method, Plan, Scoring, Training
from lindt.protocols import Adaptation, Aggregator, Detection, Penalty, Recovery, Stop
from lindt.registry import kind_of, kinds
from lindt.server.aggregation import Median, TrimmedMean
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain
from lindt.server.recovery import OnDetection, QuietRounds


def placed(protocol: type, component: Any) -> Plan:
    """A plan with the component where it belongs."""
    environment, method = Environment(), Method()
    if protocol is Stop:
        return Plan(method=Method(recovery=OnDetection(stop=component)))
    if protocol is Model:
        return Plan(model=component)
    if protocol is Partition:
        return Plan(data=Data(allocation=component))
    where = {Participation: "participation", Threat: "threat", Privacy: "privacy"}
    if protocol in where:
        return Plan(environment=dataclasses.replace(environment, **{where[protocol]: component}))
    if protocol is Detection:
        return Plan(detection=component)
    detection = Gain() if getattr(component, "needs_reports", False) else Delta()
    part = {Adaptation: "adaptation", Aggregator: "aggregator", Penalty: "penalty", Recovery: "recovery"}
    return Plan(method=dataclasses.replace(method, **{part[protocol]: component}), detection=detection)


def example(kind: type) -> Any:
    return Until(7, NextCharacter()) if kind is Until else kind()


PROTOCOLS = (
    Adaptation, Aggregator, Penalty, Recovery, Stop, Participation, Threat, Privacy, Partition, Model, Detection
)  # fmt: skip
KINDS = [(protocol, kind) for protocol in PROTOCOLS for kind in kinds(protocol).values()]
FULL = Plan(
    detection=Gain(alpha=0.1, combine="median"),
    name="everything-is-different",
    seed=7,
    rounds=3,
    threads=2,
    data=Data(clients=11, test_share=0.25, allocation=Groups((2, 1), (3, 1), spread=0.5, floor=3)),
    model=Lstm(hidden=8, dropout=0.0),
    training=Training(1.47, decay=1.0, epochs=2, batch=50, max_norm=1.5, optimizer=Sgd(0.9, True, 0.1), accumulate=3),
    environment=Environment(
        Sampled(0.5, 3, 1),
        Until(9, Backdoor(0.25, ((1, 2), (3, 4), (5, 6)), 4, 2)),
        Gaussian(S=3.0, sigma=1e-7),
    ),
    method=Method(
        Dual(points=("a", "b.c:step"), scale="cosine", first="random", trains="head"),
        TrimmedMean(0.3),
        Proximal(0.5),
        OnDetection(0.2, 3, "spread", "consecutive", QuietRounds(4), "once"),
        "global",
    ),
    alone=Alone(epochs=3, patience=2, held_out=0.5, refit=False),
    scoring=Scoring(2, 3, "macro_f1", "given", (1.0, 0.0, 2.5), "counted"),
    early_stop=EarlyStop(4),
)


def there_and_back(plan: Plan) -> Plan:
    return from_dict(from_toml(tomli_w.dumps(to_dict(plan))))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_survives_toml_and_may_be_named(name: str) -> None:
    plan = Plan(method=METHODS[name])
    assert there_and_back(plan) == plan == from_dict(from_toml(f'method = "{name}"'))


@pytest.mark.parametrize(("protocol", "kind"), KINDS, ids=lambda x: x.__name__)
def test_every_component_survives_toml(protocol: type, kind: type) -> None:
    plan = placed(protocol, example(kind))
    assert there_and_back(plan) == plan
    assert kind.__name__ in repr(there_and_back(plan))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda x: x.__name__)
def test_a_component_is_found_by_its_kind(protocol: type) -> None:
    assert {kind: kind_of(cls) for kind, cls in kinds(protocol).items()} == {kind: kind for kind in kinds(protocol)}


def test_a_plan_of_other_values_everywhere_survives_toml() -> None:
    assert there_and_back(FULL) == FULL
    default = to_dict(Plan(), whole=True)
    for field in dataclasses.fields(Plan):
        assert to_dict(FULL)[field.name] != default[field.name]


def test_an_empty_file_is_the_default_plan() -> None:
    assert from_dict(from_toml("")) == Plan()


@pytest.mark.parametrize(("rounds", "patience"), [(80, 25), (8, 2), (800, 250), (10_000, 250)])
def test_a_plan_without_a_method_watches_with_a_patience_that_its_rounds_can_reach(rounds: int, patience: int) -> None:
    for plan in (from_dict({"rounds": rounds}), Plan(rounds=rounds)):
        assert plan.method.recovery == OnDetection(epsilon=0.1, patience=patience)
        assert dataclasses.replace(plan.method, recovery=METHODS["watch"].recovery) == METHODS["watch"]
        assert there_and_back(plan) == plan
        assert dataclasses.replace(plan, seed=1).method == plan.method
    changed = resolve(None, ["rounds=8"])
    assert changed.method == resolve().method  # the preset's own


def test_set_reaches_into_the_method_of_a_plan_that_names_none(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("rounds = 8")
    method = resolve(str(tmp_path / "plan.toml"), ["method.aggregator=median"]).method
    assert (method.aggregator, method.recovery) == (Median(), OnDetection(epsilon=0.1, patience=2))


@pytest.mark.parametrize(("earlier", "name"), [("lindt", "lindt-always"), ("runtime", "lindt-on-detection")])
def test_a_method_is_found_under_its_earlier_name(earlier: str, name: str) -> None:
    assert METHODS[earlier] == METHODS[name] == from_dict({"method": earlier}).method
    assert earlier in METHODS
    assert earlier not in list(METHODS)
    assert from_dict({"method": earlier}) == from_dict({"method": name})
    with pytest.raises(PlanError, match=name):
        from_dict({"method": "nothing"})


def test_kinds_are_class_names_in_snake_case() -> None:
    assert [kind_of(c) for c in (TrimmedMean(), FineTuneHead, Apfl, Gaussian(), OnDetection)] == [
        "trimmed_mean",
        "fine_tune_head",
        "apfl",
        "gaussian",
        "on_detection",
    ]


def test_a_component_may_be_a_word_and_a_whole_number_a_float() -> None:
    plan = from_dict(
        from_toml('model = "linear"\n[method]\naggregator = "median"\n[environment.privacy]\nkind = "gaussian"\nS = 3')
    )
    assert plan == Plan(
        model=Linear(), method=Method(aggregator=Median()), environment=Environment(privacy=Gaussian(S=3.0))
    )
    assert type(plan.environment.privacy.S) is float  # type: ignore[attr-defined]


WRONG: list[tuple[str, str, list[str]]] = [
    # an unknown field, with a guess or with what there is
    ("[training]\nepoch = 2", "training.epoch", ["2", "no such field", "did you mean 'epochs'?"]),
    ("sede = 1", "sede", ["1", "did you mean 'seed'?"]),
    (
        "[training]\nxyzzy = 1",
        "training.xyzzy",
        ["no such field", "accumulate, batch, decay, epochs, max_norm, optimizer, rate"],
    ),
    (
        "[method.recovery]\nkind = 'on_evidence'\nepsilon = 0.1",
        "method.recovery.epsilon",
        ["on_evidence has no such field", "on_detection has it", "set method.recovery.kind too"],
    ),
    ("[method.aggregator]\nkind = 'mean'\nshare = 0.2", "method.aggregator.share", ["0.2", "no such field"]),
    ("[data.allocation]\nkind = 'classes'\nper_clients = 3", "data.allocation.per_clients", ["'per_client'"]),
    # another type
    ("rounds = '80'", "rounds", ["'80'", "give a whole number, not a str"]),
    ("rounds = 80.0", "rounds", ["80.0", "give a whole number, not a float"]),
    ("rounds = true", "rounds", ["True", "give a whole number, not a bool"]),
    ("name = 3", "name", ["3", "give a text in quotes, not a int"]),
    ("[training]\nrate = true", "training.rate", ["True", "give a number, not a bool"]),
    ("[training]\nrate = '0.1'", "training.rate", ["'0.1'", "give a number, not a str"]),
    ("[alone]\nprivate = 1", "alone.private", ["1", "give true or false, not a int"]),
    ("name = 2020-01-01", "name", ["give a text in quotes, not a date"]),
    ("training = 3", "training", ["3", "give a table of fields"]),
    ("method = 3", "method", ["3", "give a table of fields"]),
    # no number at all, or one too large
    ("[training]\nrate = nan", "training.rate", ["nan", "give a finite number"]),
    ("[training]\nmax_norm = inf", "training.max_norm", ["inf", "give a finite number"]),
    (f"[training]\nrate = 1{'0' * 400}", "training.rate", ["1329 bits", "at most 63 bits"]),
    (f"seed = 0x{'f' * 5000}", "seed", ["20000 bits", "at most 63 bits"]),
    # lists
    ("[scoring]\nweights = 3", "scoring.weights", ["3", "give a list"]),
    ("[scoring]\nweighting = 'given'\nweights = [1, 'a']", "scoring.weights[1]", ["'a'", "give a number"]),
    (
        "[environment.threat]\nkind = 'backdoor'\nrelabel = [[4, 7], [5]]",
        "environment.threat.relabel[1]",
        ["[5]", "give a list of 2"],
    ),
    (
        "[environment.threat]\nkind = 'backdoor'\nrelabel = [[4, true]]",
        "environment.threat.relabel[0][1]",
        ["True", "give a whole number"],
    ),
    # the kind
    ("[method.aggregator]\nshare = 0.2", "method.aggregator.kind", ["is missing", "'median'", "'trimmed_mean'"]),
    ("[method.aggregator]\nkind = 'medean'", "method.aggregator.kind", ["'medean'", "did you mean 'median'?"]),
    ("[method.aggregator]\nkind = 3", "method.aggregator.kind", ["3", "choose among", "'mean'"]),
    ("[method]\naggregator = 'sum'", "method.aggregator.kind", ["'sum'", "choose among", "'weighted_mean'"]),
    ("[method]\naggregator = 3", "method.aggregator", ["3", "give a table with `kind`, one of", "'mean'"]),
    ("method = 'lindt-alway'", "method", ["'lindt-alway'", "choose among", "did you mean 'lindt-always'?"]),
    (
        "[environment.threat]\nkind = 'until'\nthreat = 'backdoor'",
        "environment.threat.last_round",
        ["is missing", "until needs it"],
    ),
    # values that cannot be
    ("rounds = 0", "rounds", ["0", "at least 1 round"]),
    ("seed = -1", "seed", ["-1", "0 or more"]),
    ("name = ''", "name", ["''", "folder"]),
    ("name = 'a/b'", "name", ["'a/b'", "folder"]),
    ("[method.aggregator]\nkind = 'trimmed_mean'\nshare = 0.5", "method.aggregator.share", ["0.5", "less than 0.5"]),
    ("[method.recovery]\nkind = 'on_detection'\nepsilon = 0", "method.recovery.epsilon", ["0.0", "above 0"]),
    (
        "[method.recovery]\nkind = 'on_detection'\nstop = {kind = 'quiet_rounds', rounds = 0}",
        "method.recovery.stop.rounds",
        ["0", "at least 1"],
    ),
    ("[method.recovery]\nkind = 'on_detection'\ncounting = 'x'", "method.recovery.counting", ["'x'", "'consecutive'"]),
    ("[environment.privacy]\nkind = 'gaussian'\nsigma = -1", "environment.privacy.sigma", ["-1.0", "from 0 to 1e6"]),
    (
        "[environment.participation]\nkind = 'sampled'\nrate = 2",
        "environment.participation.rate",
        ["2.0", "above 0 and up to 1"],
    ),
    ("[data]\nclients = 1", "data.clients", ["1", "at least 2"]),
    ("[data]\nsource = 'mnits'", "data.source", ["'mnits'", "choose among", "'digits'"]),
    ("[scoring]\nmetric = 'auc'", "scoring.metric", ["'auc'", "'accuracy'", "'macro_f1'"]),
    ("[scoring]\nweights = [1.0]", "scoring.weights", ["(1.0,)", "weighting = 'given'"]),
    ("[scoring]\nweighting = 'given'\nweights = [0, 0]", "scoring.weights", ["give at least one weight above 0"]),
    ("[training]\ndecay = 1.5", "training.decay", ["1.5", "above 0 and up to 1"]),
]


@pytest.mark.parametrize(
    ("text", "field", "words"), WRONG, ids=[f"{field}: {text[-24:]!r}" for text, field, _ in WRONG]
)
def test_an_error_names_the_field_the_value_and_the_fix(text: str, field: str, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        from_dict(from_toml(text))
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} = ")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "text",
    ["rounds = ", "[a", "a = 1\na = 2", f"a = {'9' * 5000}", f"a = {'[' * 5000}{']' * 5000}", "a = 'x\x00y'"],
    ids=["no value", "no bracket", "twice", "digits", "depth", "control character"],
)
def test_what_is_no_toml_is_said_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"^mine is not valid TOML: ") as caught:
        from_toml(text, "mine")
    assert "\n" not in str(caught.value)


def test_tables_too_deep_are_refused() -> None:
    threat: dict[str, Any] = {"kind": "no_threat"}
    for _ in range(5000):
        threat = {"kind": "until", "last_round": 1, "threat": threat}
    with pytest.raises(UserError, match="nested too deeply"):
        from_dict({"environment": {"threat": threat}})


class TestOverride:
    FILE = """
    method = "runtime"
    [environment]
    participation = "sampled"
    privacy = { kind = "gaussian", S = 3.0, sigma = 0.5 }
    """

    def set(self, *assignments: str) -> Plan:
        table = from_toml(self.FILE)
        for assignment in assignments:
            table = override(table, assignment)
        return from_dict(table)

    def test_a_value_is_read_as_toml_or_as_a_word(self) -> None:
        plan = self.set("rounds=7", "training.rate=1e-3", "alone.private=false", "name=my-run", 'data.source="digits"')
        assert (plan.rounds, plan.training.rate, plan.alone.private) == (7, 0.001, False)
        assert (plan.name, plan.data.source) == ("my-run", "digits")

    def test_a_list_and_a_table(self) -> None:
        plan = self.set("environment.threat={kind='backdoor', relabel=[[1, 2]]}", "environment.threat.epochs=2")
        assert plan.environment.threat == Backdoor(relabel=((1, 2),), epochs=2)

    def test_other_fields_stay(self) -> None:
        plan = self.set("environment.privacy.sigma=0.25")
        assert plan.environment.privacy == Gaussian(S=3.0, sigma=0.25)

    def test_another_kind_starts_from_its_own_defaults(self) -> None:
        for assignment in ("environment.privacy=no_privacy", "environment.privacy.kind=no_privacy"):
            assert self.set(assignment) == self.set("environment.privacy={kind='no_privacy'}")
        plan = self.set("method.recovery.kind=always")
        assert plan.method == METHODS["lindt"]

    def test_the_kind_it_has_already_keeps_its_fields(self) -> None:
        for assignment in ("environment.privacy=gaussian", "environment.privacy.kind=gaussian"):
            assert self.set(assignment).environment.privacy == Gaussian(S=3.0, sigma=0.5)

    def test_a_named_methods_fields(self) -> None:
        plan = self.set("method.recovery.patience=5", "method.aggregator=median")
        recovery = OnDetection(epsilon=0.1, patience=5)
        assert plan.method == dataclasses.replace(METHODS["runtime"], recovery=recovery, aggregator=Median())
        assert self.set("method=fedprox").method == METHODS["fedprox"]

    def test_a_named_components_fields(self) -> None:
        assert self.set("environment.participation.rate=0.5").environment.participation == Sampled(rate=0.5)

    def test_what_is_not_there_yet(self) -> None:
        assert self.set(
            "data.clients=5", "data.allocation={kind='classes'}", "data.allocation.per_client=3"
        ).data == Data(clients=5, allocation=Classes(per_client=3))

    def test_the_table_given_is_left_as_it_was(self) -> None:
        table = from_toml(self.FILE)
        override(table, "environment.privacy.sigma=0.25")
        assert table == from_toml(self.FILE)

    @pytest.mark.parametrize("assignment", ["rounds", "=5", " = 5", ""])
    def test_what_assigns_nothing_is_refused(self, assignment: str) -> None:
        with pytest.raises(UserError, match=r"write it as field\.subfield=value"):
            override({}, assignment)

    def test_a_field_of_a_plain_value_is_refused(self) -> None:
        with pytest.raises(PlanError, match=r"^rounds\.x = 5: rounds is a plain value"):
            override({"rounds": 3}, "rounds.x=5")

    def test_a_wrong_word_is_refused_where_it_is_used(self) -> None:
        with pytest.raises(PlanError, match=r"^rounds = 'many': give a whole number"):
            self.set("rounds=many")
        with pytest.raises(PlanError, match=r"did you mean 'rounds'\?"):
            self.set("round=5")


scalars = (
    st.booleans()
    | st.integers()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([kind_of(kind) for _, kind in KINDS] + list(METHODS))
    | st.dates()
    | st.datetimes()
    | st.just(datetime.time(1, 2))
)
names = sorted(
    {"kind"}
    | {f.name for _, kind in KINDS for f in dataclasses.fields(kind)}
    | {
        f.name
        for table in (Plan, Data, Training, Alone, Scoring, Environment, Method)
        for f in dataclasses.fields(table)
    }
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def read(table: Any) -> None:
    """A plan that holds what it was given, or a sentence."""
    try:
        plan = from_dict(table)
    except UserError as error:
        sentence = str(error)
    else:
        assert there_and_back(plan) == plan
        return
    assert sentence


@given(table=st.dictionaries(st.sampled_from(names) | st.text(max_size=3), trees, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_tables_give_anything_but_a_plan_or_a_user_error(table: dict[str, Any]) -> None:
    read(table)


def changed(table: Any, draw: Any) -> Any:
    """The tables with something in them replaced by anything."""
    if isinstance(table, dict) and table and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(table)))
        return {**table, key: changed(table[key], draw)}
    return draw(trees)


PLANS = [FULL, *(Plan(method=method) for method in METHODS.values()), *(placed(p, example(k)) for p, k in KINDS)]


@given(plan=st.sampled_from(PLANS), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_plan_with_anything_wrong_in_it_is_a_plan_or_a_user_error(plan: Plan, data: st.DataObject) -> None:
    table = to_dict(plan)
    for _ in range(data.draw(st.integers(1, 3))):
        table = changed(table, data.draw)
    read(table)


@given(text=st.text(max_size=30), path=st.lists(st.sampled_from(names), min_size=1, max_size=4), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_assignment_gives_anything_but_a_plan_or_a_user_error(
    text: str, path: list[str], data: st.DataObject
) -> None:
    table = to_dict(data.draw(st.sampled_from(PLANS)))
    for assignment in (f"{'.'.join(path)}={text}", text):
        with suppress(UserError):
            table = override(table, assignment)
    read(table)


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_no_text_gives_anything_but_tables_or_a_user_error(text: str) -> None:
    with suppress(UserError):
        read(from_toml(text))


def test_a_component_that_an_override_replaces_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Gain) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(Gain, "__post_init__", refuse)
    with pytest.raises(AssertionError, match="built"):
        resolve("digits-nfl")
    plan = resolve("digits-nfl", ["detection=delta", "method=fedavg", "data.clients=7"], rounds=3)
    assert (kind_of(plan.detection), plan.data.clients, plan.rounds) == ("delta", 7, 3)


def test_an_override_reaches_into_a_table_that_the_file_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('name = "mine"\n')
    plan = resolve(str(tmp_path / "plan.toml"), ["data.allocation.per_client=3", "scoring.every=3"])
    assert (plan.data.allocation, plan.data.source, plan.scoring.every) == (Classes(3), "digits", 3)


def test_overrides_of_one_table_are_judged_together() -> None:
    """A picture of 8 pixels is too small for a kernel of 5, which the next override makes smaller."""
    plan = resolve("cifar-nfl", ["model.side=8", "model.kernel=2"])
    assert (plan.model.side, plan.model.kernel) == (8, 2)  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"model\.side"):
        resolve("cifar-nfl", ["model.side=8"])
