// The page of one run, in the order of the questions: is it helping, since when, whom does it hurt, why, what was done?

import { followed } from "./client";
import type { Followed } from "./client";
import { el } from "./dom";
import { gainChart } from "./gains";
import { forget, lineChart } from "./lines";
import type { Line } from "./lines";
import { count, gain, score, small, tick, typeset } from "./numbers";
import { panels } from "./panels";
import { detection, happenings, interval, marks, portrait, scored, scoredSeries, series, spells, statistic, until } from "./story";
import type { Decision, Run, Scores } from "./types";

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
  const evidence = block("Gain on validation data", "What clients report at each visit: how the shared model does on samples that nobody trained on, less how the client's own model does. The band is two standard errors either way. The verdict rests on a test of these reports.", tested.node, testedEvents);
  const deltas = lineChart(VIEW, "Delta against epsilon over rounds");
  const counts = lineChart(VIEW, "Rounds above epsilon so far, against r\u2032", 130);
  const events = el("ol", { class: "events" });
  const divergence = block("Delta against epsilon", "How far the clients' weights lie apart, less the noise. Where a detector watches it: in more than r\u2032 rounds above epsilon, suspected. It can stay high in a healthy federation.", deltas.node, counts.node, events);
  const scores = lineChart(VIEW, "Local, central and private accuracy over rounds", 260);
  const place = el("div", {});
  const gains = gainChart(choose, (number) => {
    const client = current?.clients.find((one) => one.client === number);
    return client && current ? portrait(current, client) : "";
  });
  const slider = el("input", { type: "range", min: 0, step: 1, id: "scored", input: () => slide() });
  const slid = el("output", { for: "scored" });
  const gainNote = el("p", { class: "soft" });
  const parts = panels(VIEW);
  const nothing = parts.map(() => el("p", { class: "soft" }));

  const node = el(
    "div",
    { class: "run" },
    verdict,
    divergence,
    block("Accuracy", "Local: what each client predicts with, on its own test data. Central: the shared model on everyone's. Alone: the model each client trained by itself.", scores.node),
    block(
      "Gain of each client",
      "What a client wins or loses against training alone. Solid: clearly so, by a paired test on its test samples. Pale: it may be chance.",
      el("p", { class: "key" }, key("bar worse clear", "clearly worse off"), key("bar worse", "worse, maybe chance"), key("bar better", "better, maybe chance"), key("bar better clear", "clearly better off"), key("ring", "when NFL was detected")),
      el("p", { class: "row" }, el("label", { for: "scored" }, "Scored round"), slider, slid),
      gains.node,
      gainNote,
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
    gainNote.textContent = !line ? "No round is scored yet." : out ? `${left} attackers are left out: their gain is nobody's aim.` : "";
    if (!line) return;
    const first = detection(run);
    gains.draw(run, line, first && first.round < line.round ? first : null);
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
        rule: { value: 0, label: "as alone", left: true },
      });
    }
    const watched = run.rule?.statistic ?? "delta";
    deltas.draw({
      ...common,
      lines: [{ label: run.rule ? statistic(run) : "Delta", values: series(run, (line) => line[watched]), colour: "delta" }],
      label: statistic(run),
      format: small,
      ...(run.rule ? { rule: { value: run.rule.epsilon, label: `epsilon = ${run.rule.epsilon}` } } : {}),
    });
    const title = divergence.querySelector("h2");
    if (title) title.textContent = run.rule ? `${statistic(run)} against epsilon` : "Delta";
    counts.node.hidden = !run.rule;
    if (run.rule) {
      counts.draw({ ...common, marks: [], lines: [{ label: `count of rounds above epsilon, r\u2032 = ${run.rule.patience}`, values: series(run, (line) => line.count), colour: "delta" }], label: "count", format: (value) => String(Math.round(value)), rule: { value: run.rule.patience, label: `r\u2032 = ${run.rule.patience}` } });
    }
    const told = happenings(run).filter((one) => one.kind !== "refused");
    (reports ? events : testedEvents).replaceChildren();
    (reports ? testedEvents : events).replaceChildren(...told.slice(-30).map((one) => el("li", { class: one.kind }, el("b", {}, `Round ${one.round}: `), one.text)));
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

/** The share of clients that are not worse off than alone (IPR). Runs of earlier versions have the counts alone. */
function shareOf(end: Scores | null | undefined): string {
  if (!end || end.harmed === null) return "\u2013";
  const known = end.betas.filter((beta) => beta !== null).length;
  return known ? `${Math.round((100 * (known - end.harmed)) / known)}%` : "\u2013";
}

function standing(end: Scores | null | undefined): string {
  if (!end || end.harmed === null || end.ties === null) return "of the clients";
  const better = end.betas.filter((beta) => beta !== null).length - end.harmed - end.ties;
  return `better off ${better}, unchanged ${end.ties}, worse off ${end.harmed}`;
}

function verdictParts(run: Run): HTMLElement[] {
  const last = run.rounds[run.rounds.length - 1];
  const end = scored(run)[scored(run).length - 1]?.scores;
  const now = scored(run)[scored(run).length - 1]?.round;
  const unit = run.percent && typeof end?.beta === "number" ? " points" : "";
  const of = (number: number | null | undefined): string => (number === null || number === undefined || !end ? "\u2013" : `${number} of ${end.clients.length}`);
  const decision = last?.detection?.verdict;
  const facts: [string, string, string][] = [
    decision
      ? ["gain on validation data", interval(decision, run.percent).replace(" points", ""), `${run.percent ? "points, " : ""}two standard errors; ${count(decision.clients, "client")}, ${count(decision.samples, "sample")}`]
      : [statistic(run), small(last?.[run.rule?.statistic ?? "delta"]), run.rule ? `epsilon ${run.rule.epsilon}` : "no detector"],
    ["mean gain on test data", gain(end?.beta, run.percent) + unit, now === undefined ? "no round is scored yet" : `round ${now}; median ${gain(end?.median_gain, run.percent)}`],
    ["not worse off", shareOf(end), standing(end)],
    ["clearly better off", of(end?.clearly_better), "clients, by the paired test"],
    ["clearly worse off", of(end?.clearly_harmed), "clients, by the paired test"],
    ["round", `${last?.round ?? 0}${run.planned ? ` of ${run.planned}` : ""}`, STATES[run.state]],
  ];
  const said = typeset(run.verdict.sentence).split("; ");
  return [
    el("p", { class: "headline" }, el("span", { class: "sign", "aria-hidden": true }), run.verdict.headline, el("span", { class: `chip ${run.state}` }, STATES[run.state])),
    el("h1", {}, said[0] ?? ""),
    ...(said.length > 1 ? [el("ul", { class: "clauses" }, ...said.slice(1).map((text) => el("li", {}, text)))] : []),
    el("p", { class: "soft" }, [run.id, run.method, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(" \u00b7 ")),
    el("dl", { class: "facts" }, ...facts.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "soft" }, note)))),
    ...(run.state === "crashed" || run.state === "stopped" ? [el("p", { class: "note" }, "Nobody works on this run any more. It goes on from its last round with ", el("code", {}, "lindt run --out RUN --resume"), ".")] : []),
    ...run.said.map((text) => el("p", { class: "note" }, `Note: ${text}.`)),
  ];
}

export function block(title: string, about: string, ...children: (Node | string)[]): HTMLElement {
  return el("section", { class: "block" }, el("h2", {}, title), el("p", { class: "soft" }, about), ...children);
}

function key(kind: string, text: string): HTMLElement {
  return el("span", {}, el("i", { class: `cell ${kind}` }), text);
}
