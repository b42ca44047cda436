// The page of one run, in the order of the questions: does it help, since when, which clients does it hurt, why, what was done?

import { followed } from "./client";
import type { Followed } from "./client";
import { el } from "./dom";
import { bars, gainChart } from "./gains";
import { forget, lineChart } from "./lines";
import type { Line } from "./lines";
import { gain, score, small, tick, typeset } from "./numbers";
import { panels } from "./panels";
import { detection, happenings, marks, portrait, scored, scoredSeries, series, spells, statistic, until } from "./story";
import type { Decision, Run } from "./types";

export interface View {
  node: HTMLElement;
  draw(run: Run): void;
}

const VIEW = "run";
const STATES = { running: "running", ended: "ended", stopped: "stopped before its end", crashed: "stopped before its end" };

export function runView(): View {
  forget(VIEW);
  let current: Run | null = null;
  let chosenRound: number | null = null; // null: the last scored one
  let follow: Followed | null = null;

  const verdict = el("section", { class: "verdict", "aria-live": "polite" });
  const tested = lineChart(VIEW, "Gain on validation data over rounds, with two standard errors", 220);
  const testedEvents = el("ol", { class: "events" });
  const evidence = block("Gain on validation data", "Clients report this in each round that they take part in: the score of the shared model on samples that were not trained on, less the score of the model that the client trained alone; with an own metric the share of the samples on which it is better, less the share on which it is worse. The band is two standard errors above and below. The verdict is a test of these reports.", tested.node, testedEvents);
  const deltas = lineChart(VIEW, "Delta against epsilon over rounds");
  const counts = lineChart(VIEW, "Rounds above epsilon so far, against r\u2032", 130);
  const events = el("ol", { class: "events" });
  const divergence = block("Delta against epsilon", "The mean distance of the clients' weights from the shared model, less the noise. A detector that uses Delta suspects NFL after more than r\u2032 rounds above its epsilon. Delta can stay high in a healthy federation.", deltas.node, counts.node, events);
  const scores = lineChart(VIEW, "Local, central and private scores over rounds", 260);
  const measured = block("Score", "Local: the clients' predictions, each on its own test data. Central: the shared model, on the test data of all clients. Alone: the models that the clients trained alone.", scores.node);
  const place = el("div", {});
  const gains = gainChart(choose, (number) => {
    const client = current?.clients.find((one) => one.client === number);
    return client && current ? portrait(current, client) : "";
  });
  const slider = el("input", { type: "range", min: 0, step: 1, id: "scored", input: () => slide() });
  const slid = el("output", { for: "scored" });
  const key = el("p", { class: "key" });
  const gainNote = el("p", { class: "soft" });
  const parts = panels(VIEW);
  const nothing = parts.map(() => el("p", { class: "soft" }));

  const node = el(
    "div",
    { class: "run" },
    verdict,
    divergence,
    measured,
    block(
      "Gain of each client",
      "The score of a client's predictions, less that of the model that it trained alone. Solid bars: clear by a paired test on the client's test samples. Pale bars: perhaps chance.",
      key,
      el("p", { class: "row" }, el("label", { for: "scored" }, "Scored round"), slider, slid),
      gainNote,
      gains.node,
      place,
    ),
    ...parts.map((part, index) => block(part.title, part.about, part.node, nothing[index] ?? "")),
  );

  function choose(client: number): void {
    follow = followed(VIEW, client, () => {
      follow = null;
      place.replaceChildren();
    });
    place.replaceChildren(follow.node);
    if (current) follow.draw(current);
    follow.node.querySelector("h3")?.focus({ preventScroll: true });
    follow.node.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function slide(): void {
    if (!current) return;
    const found = scored(current);
    const at = Number(slider.value);
    chosenRound = at >= found.length - 1 ? null : (found[at]?.round ?? null);
    drawGains(current);
  }

  function drawGains(run: Run): void {
    const found = scored(run);
    slider.max = String(Math.max(0, found.length - 1));
    slider.disabled = found.length < 2;
    const at = chosenRound === null ? found.length - 1 : found.findIndex((line) => line.round === chosenRound);
    slider.value = String(at);
    const line = found[at];
    slid.textContent = line ? `round ${line.round}` : "none yet";
    gains.node.hidden = !line;
    const left = run.clients.filter((one) => one.attacker).length;
    const out = line && left && !run.clients.some((one) => one.attacker && line.scores?.clients.includes(one.client));
    gainNote.textContent = !line ? "No round is scored yet." : out ? (left === 1 ? "The attacker is not counted." : `The ${left} attackers are not counted.`) : "";
    key.hidden = !line;
    if (!line) return;
    const first = detection(run);
    const before = first && first.round < line.round ? first : null;
    gains.draw(run, line, before);
    const drawn = bars(line, before);
    const many = (wanted: (beta: number, clear: boolean) => boolean): number => drawn.filter((bar) => wanted(bar.beta, bar.clear)).length;
    key.replaceChildren(
      entry("worse clear", `clearly worse off ${many((beta, clear) => beta < 0 && clear)}`),
      entry("worse", `worse, maybe chance ${many((beta, clear) => beta < 0 && !clear)}`),
      entry("same", `unchanged ${many((beta) => beta === 0)}`),
      entry("better", `better, maybe chance ${many((beta, clear) => beta > 0 && !clear)}`),
      entry("better clear", `clearly better off ${many((beta, clear) => beta > 0 && clear)}`),
      ...(before ? [entry("ring", run.adapts ? `before recovery, in round ${before.round}` : `when NFL was suspected, in round ${before.round}`)] : []),
    );
  }

  function draw(run: Run): void {
    current = run;
    verdict.replaceChildren(...verdictParts(run));
    verdict.className = `verdict ${run.verdict.tone}`;
    const rounds = run.rounds.map((line) => line.round);
    const common = { rounds, until: until(run), marks: marks(run), shaded: spells(run) };
    const reports = run.rounds.some((line) => line.detection);
    if (reports) {
      if (!evidence.isConnected) verdict.after(evidence); // a run whose clients report nothing has no such block
      const gains = series(run, (line) => line.detection?.verdict.gain);
      const edge = (sign: number) => series(run, (line) => bound(line.detection?.verdict ?? null, sign));
      const lines: Line[] = [{ label: "the shared model", values: gains, colour: "local", band: { low: edge(-1), high: edge(1) } }];
      if (run.rounds.some((line) => line.detection?.recovered)) lines.push({ label: "what clients predict with", values: series(run, (line) => line.detection?.recovered?.gain), colour: "recover", dash: [6, 4] });
      tested.draw({
        ...common,
        lines,
        label: run.percent ? "gain (points)" : "gain",
        format: (value) => gain(value, run.percent),
        tick: (value) => tick(value, run.percent),
        rule: { value: 0, label: "as training alone" },
      });
    }
    const watched = run.rule?.statistic ?? "delta";
    deltas.draw({
      ...common,
      lines: [{ label: run.rule ? statistic(run) : "Delta", values: series(run, (line) => line[watched]), colour: "delta" }],
      label: statistic(run),
      format: small,
      ...(run.rule ? { rule: { value: run.rule.epsilon, label: `the detector's epsilon = ${run.rule.epsilon}` } } : {}),
    });
    const title = divergence.querySelector("h2");
    if (title) title.textContent = run.rule ? `${statistic(run)} against the detector's epsilon` : "Delta";
    counts.node.hidden = !run.rule;
    if (run.rule) {
      counts.draw({ ...common, marks: [], lines: [{ label: "rounds above epsilon so far", values: series(run, (line) => line.count), colour: "delta" }], label: "count", format: (value) => String(Math.round(value)), rule: { value: run.rule.patience, label: `r\u2032 = ${run.rule.patience}, suspected above it` } });
    }
    const told = happenings(run).filter((one) => one.kind !== "refused");
    (reports ? events : testedEvents).replaceChildren();
    (reports ? testedEvents : events).replaceChildren(...told.slice(-30).map((one) => el("li", { class: one.kind }, el("b", {}, `Round ${one.round}: `), one.text)));
    const metric = measured.querySelector("h2");
    if (metric) metric.textContent = run.metric.charAt(0).toUpperCase() + run.metric.slice(1);
    scores.draw({
      ...common,
      lines: [
        { label: "local", values: scoredSeries(run, (one) => one.local), colour: "local" },
        { label: "central", values: scoredSeries(run, (one) => one.central), colour: "central", dash: [6, 4] },
        { label: "alone", values: scoredSeries(run, (one) => one.private), colour: "alone", dash: [2, 3] },
      ],
      label: run.percent ? `${run.metric} (%)` : run.metric,
      format: (value) => score(value, run.percent),
      tick: (value) => tick(value, run.percent),
    });
    drawGains(run);
    follow?.draw(run);
    parts.forEach((part, index) => {
      const shown = part.draw(run);
      part.node.hidden = !shown;
      const note = nothing[index];
      if (note) note.textContent = shown ? "" : part.absent;
    });
  }

  return { node, draw };
}

/** An end of the interval around a gain. */
function bound(decision: Decision | null, sign: number): number | null {
  if (!decision || decision.gain === null) return null;
  return decision.gain + sign * 2 * (decision.error ?? 0);
}

function verdictParts(run: Run): HTMLElement[] {
  const last = run.rounds[run.rounds.length - 1];
  const said = typeset(run.verdict.sentence).split("; ");
  const at = `round ${last?.round ?? 0}${run.planned ? ` of ${run.planned}` : ""}`;
  return [
    el("p", { class: "headline" }, el("span", { class: "sign", "aria-hidden": true }), run.verdict.headline, el("span", { class: `chip ${run.state}` }, STATES[run.state]), el("span", { class: "chip" }, at)),
    el("h1", {}, ...withBasis(said[0] ?? "")),
    ...run.facts.flatMap((group) => [
      el("p", { class: "facts-title" }, typeset(group.title)),
      el("dl", { class: "facts" }, ...group.facts.map((fact) => el("div", {}, el("dt", {}, fact.name), el("dd", {}, fact.value === "-" ? "\u2013" : typeset(fact.value)), el("dd", { class: "soft" }, typeset(fact.note))))),
    ]),
    ...(said.length > 1 ? [el("ul", { class: "clauses" }, ...said.slice(1).map((text) => el("li", {}, text)))] : []),
    el("p", { class: "soft" }, [run.id, run.method, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(" \u00b7 ")),
    ...(run.state === "crashed" || run.state === "stopped" ? [el("p", { class: "note" }, "No process works on this run. To continue it from its last round: ", el("code", {}, "lindt run --out RUN --resume"), ".")] : []),
    ...run.said.map((text) => el("p", { class: "note" }, `Note: ${text}.`)),
  ];
}

/** The data behind a sentence, in brackets at its end, are set smaller. */
function withBasis(text: string): (Node | string)[] {
  const at = text.endsWith(")") ? text.lastIndexOf(" (") : -1;
  return at < 0 ? [text] : [text.slice(0, at), el("span", { class: "basis" }, text.slice(at))];
}

export function block(title: string, about: string, ...children: (Node | string)[]): HTMLElement {
  return el("section", { class: "block" }, el("h2", {}, title), el("p", { class: "soft" }, about), ...children);
}

function entry(kind: string, text: string): HTMLElement {
  return el("span", {}, el("i", { class: `cell ${kind}` }), text);
}
