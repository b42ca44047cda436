// The page of one run, in the order of the questions: is it helping, since when, whom does it hurt, why, what was done?

import { followed } from "./client";
import type { Followed } from "./client";
import { el } from "./dom";
import { gainChart } from "./gains";
import { forget, lineChart } from "./lines";
import { gain, score, small, tick } from "./numbers";
import { panels } from "./panels";
import { detection, happenings, marks, portrait, scored, scoredSeries, series, spells, statistic, until } from "./story";
import type { Run } from "./types";

export interface View {
  node: HTMLElement;
  draw(run: Run): void;
}

const VIEW = "run";
const STATES = { running: "running", ended: "ended", crashed: "stopped before its end" };

export function runView(): View {
  forget(VIEW);
  let current: Run | null = null;
  let chosenRound: number | null = null; // null: the last scored one
  let follow: Followed | null = null;

  const verdict = el("section", { class: "verdict", "aria-live": "polite" });
  const deltas = lineChart(VIEW, "Delta against epsilon over rounds");
  const counts = lineChart(VIEW, "Rounds above epsilon so far, against r\u2032", 130);
  const events = el("ol", { class: "events" });
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
    block("Delta against epsilon", "How far the clients' weights lie apart, less the noise. In a federation that converges it falls to zero. In more than r\u2032 rounds above epsilon: suspected.", deltas.node, counts.node, events),
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
    const watched = run.rule?.statistic ?? "delta";
    deltas.draw({
      ...common,
      lines: [{ label: run.rule ? statistic(run) : "Delta", values: series(run, (line) => line[watched]), colour: "delta" }],
      label: statistic(run),
      format: small,
      ...(run.rule ? { rule: { value: run.rule.epsilon, label: `epsilon = ${run.rule.epsilon}` } } : {}),
    });
    counts.node.hidden = !run.rule;
    if (run.rule) {
      counts.draw({ ...common, marks: [], lines: [{ label: `count of rounds above epsilon, r\u2032 = ${run.rule.patience}`, values: series(run, (line) => line.count), colour: "delta" }], label: "count", format: (value) => String(Math.round(value)), rule: { value: run.rule.patience, label: `r\u2032 = ${run.rule.patience}` } });
    }
    const told = happenings(run).filter((one) => one.kind !== "refused");
    events.replaceChildren(...told.slice(-30).map((one) => el("li", { class: one.kind }, el("b", {}, `Round ${one.round}: `), one.text)));
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

function verdictParts(run: Run): HTMLElement[] {
  const last = run.rounds[run.rounds.length - 1];
  const end = scored(run)[scored(run).length - 1]?.scores;
  const beta = run.summary ? run.summary.beta : end?.beta;
  const over = run.summary ? `mean of the last ${run.summary.scored_rounds} scored rounds` : "last scored round";
  const facts: [string, string, string][] = [
    ["mean gain", gain(beta, run.percent) + (run.percent && typeof beta === "number" ? " points" : ""), over],
    ["clearly worse off", end?.clearly_harmed === null || !end ? "\u2013" : `${end.clearly_harmed} of ${end.clients.length}`, "clients, by the paired test"],
    [statistic(run), small(last?.[run.rule?.statistic ?? "delta"]), run.rule ? `epsilon ${run.rule.epsilon}` : "no detector"],
    ["round", `${last?.round ?? 0}${run.planned ? ` of ${run.planned}` : ""}`, STATES[run.state]],
  ];
  return [
    el("p", { class: "headline" }, el("span", { class: "sign", "aria-hidden": true }), run.verdict.headline, el("span", { class: `chip ${run.state}` }, STATES[run.state])),
    el("h1", {}, run.verdict.sentence),
    el("p", { class: "soft" }, [run.id, run.method, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(" \u00b7 ")),
    el("dl", { class: "facts" }, ...facts.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "soft" }, note)))),
    ...(run.state === "crashed" ? [el("p", { class: "note" }, "Nobody works on this run any more. It goes on from its last round with ", el("code", {}, "lindt run --out RUN --resume"), ".")] : []),
    ...run.said.map((text) => el("p", { class: "note" }, `Note: ${text}.`)),
  ];
}

export function block(title: string, about: string, ...children: (Node | string)[]): HTMLElement {
  return el("section", { class: "block" }, el("h2", {}, title), el("p", { class: "soft" }, about), ...children);
}

function key(kind: string, text: string): HTMLElement {
  return el("span", {}, el("i", { class: `cell ${kind}` }), text);
}
