// Several runs side by side: the table, and curves over one another with bands over seeds.

import { el } from "./dom";
import { forget, lineChart } from "./lines";
import type { Line } from "./lines";
import { deviation, gain, known, mean, score, small, tick } from "./numbers";
import { cell } from "./listing";
import { block } from "./runview";
import { interval, scored, scoredSeries, series } from "./story";
import type { Detection, Round, Run, Scores } from "./types";

interface Group {
  label: string;
  method: string;
  runs: Run[];
}

interface Measure {
  name: string;
  label: (percent: boolean, metric: string) => string;
  pick: (line: Round) => number | null | undefined;
  format: (value: number, percent: boolean) => string;
  tick: (value: number, percent: boolean) => string;
}

const VIEW = "compare";
const PALETTE = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6", "series-7"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const MEASURES: Measure[] = [
  { name: "mean gain", label: (percent) => (percent ? "gain (points)" : "gain"), pick: (line) => line.scores?.beta, format: gain, tick },
  { name: "gain on validation data", label: (percent) => (percent ? "gain (points)" : "gain"), pick: (line) => line.detection?.verdict.gain, format: gain, tick },
  { name: "local", label: (percent, metric) => (percent ? `local ${metric} (%)` : `local ${metric}`), pick: (line) => line.scores?.local, format: score, tick },
  { name: "central", label: (percent, metric) => (percent ? `central ${metric} (%)` : `central ${metric}`), pick: (line) => line.scores?.central, format: score, tick },
  { name: "clearly worse off", label: () => "clients", pick: (line) => line.scores?.clearly_harmed, format: small, tick: small },
  { name: "Delta", label: () => "Delta", pick: (line) => line.delta, format: small, tick: small },
  { name: "attack success", label: () => "success on the clients' predictions (%)", pick: (line) => line.scores?.attack_local, format: (value) => score(value, true), tick: (value) => tick(value, true) },
];

/** Runs that differ only in their seed are one row and one curve. A second run with the same seed has its own row. */
export function groups(runs: Run[]): Group[] {
  const found = new Map<string, Run[]>();
  for (const run of runs) {
    let name = run.group;
    while (found.get(name)?.some((other) => other.seed === run.seed)) name += " again";
    found.set(name, [...(found.get(name) ?? []), run]);
  }
  const made = [...found.values()].map((mine) => ({ runs: mine, method: mine[0]?.method ?? "", label: mine[0]?.id ?? "" }));
  for (const group of made) {
    const alike = made.filter((other) => other.method === group.method).length;
    const name = group.runs[0]?.name ?? "";
    const where = group.runs.length > 1 ? `${name}, ${group.runs.length} seeds` : (group.runs[0]?.id ?? "");
    group.label = alike === 1 ? group.method : `${group.method} (${where})`;
  }
  return made;
}

export function compareView(runs: Run[], open: (id: string) => void): HTMLElement {
  forget(VIEW);
  const made = groups(runs);
  const chart = lineChart(VIEW, "Curves of the compared runs", 320);
  const percent = runs.every((run) => run.percent);
  const metric = runs[0]?.metric ?? "score";
  const rounds = [...new Set(runs.flatMap((run) => run.rounds.map((line) => line.round)))].sort((a, b) => a - b);
  const until = Math.max(1, ...runs.map((run) => run.planned ?? 0), ...rounds.slice(-1));
  const choice = el("div", { class: "choice", role: "radiogroup", "aria-label": "Quantity of the chart" });

  function show(measure: Measure): void {
    const lines = made.map((group, index): Line => {
      const many = group.runs.map((run) => new Map(run.rounds.map((line) => [line.round, measure.pick(line) ?? null])));
      // Only rounds in which every seed was scored: a mean over others would jump from one seed to the next.
      const at = rounds.map((round) => known(many.map((values) => values.get(round)))).map((values) => (values.length === many.length ? values : []));
      const line: Line = { label: group.label, values: at.map(mean), colour: PALETTE[index % PALETTE.length] ?? "series-1", dash: DASHES[Math.floor(index / PALETTE.length + index) % DASHES.length] ?? [] };
      if (group.runs.length < 2) return line;
      return { ...line, band: { low: at.map((values) => (values.length ? Math.min(...values) : null)), high: at.map((values) => (values.length ? Math.max(...values) : null)) } };
    });
    const rule = measure === MEASURES[0] || measure === MEASURES[1] ? { rule: { value: 0, label: "as training alone" } } : {};
    chart.draw({ ...rule, rounds, until, lines, label: measure.label(percent, metric), format: (value) => measure.format(value, percent), tick: (value) => measure.tick(value, percent) });
  }

  const usable = MEASURES.filter((measure) => runs.some((run) => known(series(run, measure.pick)).length));
  usable.forEach((measure, index) => {
    const input = el("input", { type: "radio", name: "measure", checked: index === 0, change: () => show(measure) });
    choice.append(el("label", {}, input, measure.name));
  });
  if (usable[0]) show(usable[0]);
  const seeds = made.some((group) => group.runs.length > 1);
  return el(
    "div",
    { class: "compare" },
    el("h1", {}, `${runs.length} runs compared`),
    block("Results", "Means over the last scored rounds; with several seeds the mean over them and its standard deviation. Clearly worse and not worse off (IPR): clients in the last scored round, against training alone. Verdict: the result of the test of the clients' reports on validation data; its gain with two standard errors.", el("div", { class: "scroll" }, table(made, percent, open))),
    usable.length ? block("Curves by round", seeds ? "A line is the mean over seeds; its band goes from the lowest to the highest seed." : "A curve is a run.", choice, chart.node) : el("p", { class: "state" }, "No round was played yet in these runs."),
  );
}

function lastDetection(run: Run): Detection | null {
  return run.rounds[run.rounds.length - 1]?.detection ?? null;
}

/** The share of clients that are not worse off than alone (IPR), of the clients whose gain is known. */
function shareOf(end: Scores | null): number | null {
  const betas = known(end?.betas ?? []);
  return betas.length ? betas.filter((beta) => beta >= 0).length / betas.length : null;
}

/** State and round of the decision, gain with two standard errors, early warning. For several seeds: numbers of runs, and means. */
function verdictCells(runs: Run[], percent: boolean): string[] {
  const found = runs.map(lastDetection).filter((one): one is Detection => one !== null);
  const [only] = found;
  if (!only) return ["\u2013", "\u2013", "\u2013"];
  if (runs.length === 1) {
    const { state, since } = only.verdict;
    return [since === null ? state : `${state} since ${since}`, interval(only.verdict, percent).replace(" points", ""), only.warning === null ? "no" : String(only.warning)];
  }
  const states = [...new Set(found.map((one) => one.verdict.state))].map((state) => `${state} ${found.filter((one) => one.verdict.state === state).length}`);
  const warned = found.filter((one) => one.warning !== null).length;
  return [states.join(", "), gain(mean(known(found.map((one) => one.verdict.gain))), percent), `${warned} of ${found.length}`];
}

function table(made: Group[], percent: boolean, open: (id: string) => void): HTMLElement {
  const tests = made.some((group) => group.runs.some(lastDetection));
  const ruled = made.some((group) => group.runs.some((run) => run.rule));
  const attacked = made.some((group) => group.runs.some((run) => known(scoredSeries(run, (one) => one.attack_local)).length));
  const verdicts = tests ? ["verdict", "gain on validation data", "warning"] : [];
  const heads = ["", "gain", "clearly worse", "not worse off", "worst tenth", ...verdicts, "local", "alone", "central", ...(attacked ? ["backdoor"] : []), ...(ruled ? ["flagged in round"] : [])];
  const rows = made.map((group) => {
    const ends = group.runs.map((run) => ({ run, end: scored(run)[scored(run).length - 1]?.scores ?? null }));
    const over = (pick: (one: (typeof ends)[number]) => number | null | undefined, write: (value: number) => string): string => {
      const values = known(ends.map(pick));
      const middle = mean(values);
      const spread = deviation(values);
      if (middle === null) return "\u2013";
      return !spread ? write(middle) : `${write(middle)} \u00b1 ${write(spread).replace("+", "")}`;
    };
    const flagged = group.runs.map((run) => (run.rule ? String(run.rounds.find((line) => line.detections > 0)?.round ?? "no") : "\u2013"));
    const clients = ends.find((one) => one.end)?.end?.clients.length;
    return el(
      "tr",
      { class: group.runs.length === 1 ? (group.runs[0]?.verdict.tone ?? "") : "" },
      el("th", { scope: "row" }, group.label, group.runs.length === 1 && el("div", { class: "soft" }, group.runs[0]?.verdict.headline), el("div", { class: "links" }, ...group.runs.map((run) => el("button", { type: "button", class: "link", click: () => open(run.id) }, group.runs.length > 1 ? `seed ${run.seed}` : run.id)))),
      cell("gain", over(({ run, end }) => run.summary?.beta ?? end?.beta, (value) => gain(value, percent))),
      cell("clearly worse", over(({ end }) => end?.clearly_harmed, (value) => small(value)) + (clients === undefined ? "" : ` of ${clients}`)),
      cell("not worse off", over(({ end }) => shareOf(end), (value) => `${score(value, true)}%`)),
      cell("worst tenth", over(({ run, end }) => run.summary?.worst_tenth ?? end?.worst_tenth, (value) => gain(value, percent))),
      ...(tests ? verdictCells(group.runs, percent).map((text, index) => cell(verdicts[index] ?? "", text)) : []),
      cell("local", over(({ run, end }) => run.summary?.local ?? end?.local, (value) => score(value, percent))),
      cell("alone", over(({ run, end }) => run.summary?.private ?? end?.private, (value) => score(value, percent))),
      cell("central", over(({ run, end }) => run.summary?.central ?? end?.central, (value) => score(value, percent))),
      ...(attacked ? [cell("backdoor", over(({ run, end }) => run.summary?.attack_local ?? end?.attack_local, (value) => score(value, true)))] : []),
      ...(ruled ? [cell("flagged in round", flagged.join(", "))] : []),
    );
  });
  return el("table", { class: "cards" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...rows));
}
