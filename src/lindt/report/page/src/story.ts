// The history of a run, from its rounds: events, periods of recovery, series.

import type { Mark } from "./lines";
import { count, gain, score } from "./numbers";
import type { Client, Decision, Detection, Round, Run, Scores } from "./types";

export interface Happening {
  round: number;
  kind: "detected" | "begins" | "warning" | "helps" | "hurts" | "undecided" | "effect" | "on" | "off" | "refused" | "nobody";
  text: string;
}

export function happenings(run: Run): Happening[] {
  const found: Happening[] = [];
  let before: Before = { detections: 0, recovering: false, flag: false, detection: null };
  for (const line of run.rounds) {
    if (line.detection) found.push(...tested(run, line, before.detection));
    else if (line.detections > before.detections) found.push({ round: line.round, kind: "detected", text: detected(run, line) });
    if (run.adapts && line.recovering && !before.recovering) found.push({ round: line.round, kind: "on", text: "recovery on: each client trains a model of its own along with the shared model" });
    if (run.adapts && before.flag && !line.flag) found.push({ round: line.round, kind: "off", text: switchedOff(line, before.detection) });
    for (const one of line.refused) found.push({ round: line.round, kind: "refused", text: `the update of client ${one.client} was refused: ${one.reason}` });
    if (!line.answered.length) found.push({ round: line.round, kind: "nobody", text: "the server received no valid update and kept the weights" });
    before = line;
  }
  return found;
}

type Before = Pick<Round, "detections" | "recovering" | "flag" | "detection">;

/** New results of the test of the clients' reports in a round. */
function tested(run: Run, line: Round, before: Detection | null): Happening[] {
  const now = line.detection;
  if (!now) return [];
  const found: Happening[] = [];
  const add = (kind: Happening["kind"], text: string): void => void found.push({ round: line.round, kind, text });
  const old = before?.verdict.state ?? "too early";
  const state = now.verdict.state;
  const decided = state === "helps" || state === "hurts";
  if (old === "too early" && state !== old) add("begins", "the test begins");
  if (now.warning !== null && (before?.warning ?? null) === null) add("warning", `early warning: ${gainWords(now.verdict, run)}`);
  if (decided && state !== old) add(state, `verdict: federation ${state}${level(run)}: ${gainWords(now.verdict, run)}`);
  if (!decided && (old === "helps" || old === "hurts")) add("undecided", `undecided again: ${gainWords(now.verdict, run)}`);
  for (const [name, against] of [["recovery", "the shared model"], ["recovered", "training alone"]] as const) {
    const effect = now[name];
    if (!effect || effect.state === before?.[name]?.state || (effect.state !== "helps" && effect.state !== "hurts")) continue;
    add("effect", `recovery ${effect.state}: what the clients predict with ${compared(effect, run, against)}`);
  }
  return found;
}

function switchedOff(line: Round, before: Detection | null): string {
  const effect = line.detection?.recovery ?? before?.recovery;
  if (effect?.state === "hurts") return "recovery was switched off: what the clients predicted with was shown to be worse than the shared model";
  return "recovery off: the clients predict with the shared model again";
}

export function level(run: Run): string {
  if (run.test?.kind === "fl_guard") return ", by FL-GUARD's rule";
  return run.test && run.test.alpha !== null ? `, at level ${run.test.alpha}` : "";
}

function gainWords(decision: Decision, run: Run): string {
  if (decision.gain === null) return "no client reports its gain";
  return `the shared model ${compared(decision, run, "training alone")}, on ${count(decision.samples, "validation sample")} of ${count(decision.clients, "client")}`;
}

/** What a test has found, as in the verdict's sentence: is 12.0 \u00b1 2.0 points less accurate than training alone. */
function compared(decision: Decision, run: Run, other: string): string {
  const value = decision.gain ?? 0;
  if (run.gains === "samples") {
    const [won, lost] = value < 0 ? ["loses", "wins"] : ["wins", "loses"];
    return `${won} more validation samples against ${other} than it ${lost}, by ${size(decision, true)}% of the samples`;
  }
  const [more, less, same] = run.gains === "hits" ? ["more accurate", "less accurate", "accurate"] : ["better", "worse", "good"];
  if (Number(score(Math.abs(value), run.percent)) === 0) return `is as ${same} as ${other}`;
  const word = `${value > 0 ? more : less} than ${other}`;
  if (run.gains === "relative") return `is ${word} (${size(decision, false)}, the difference of the scores over the sum of their sizes)`;
  return `is ${size(decision, true)} points ${word}`;
}

function size(decision: Decision, percent: boolean): string {
  const both = decision.error === null ? "" : `\u00a0\u00b1\u00a0${score(2 * decision.error, percent)}`;
  return score(Math.abs(decision.gain ?? 0), percent) + both;
}

/** A gain, plus and minus two standard errors. */
export function interval(decision: Decision, percent: boolean): string {
  if (decision.gain === null) return "\u2013";
  const both = decision.error === null ? "" : `\u00a0\u00b1\u00a0${score(2 * decision.error, percent)}`;
  return gain(decision.gain, percent) + both + (percent ? " points" : "");
}

function detected(run: Run, line: Round): string {
  const rule = run.rule;
  const why = rule ? `${statistic(run)} was above the detector's epsilon = ${rule.epsilon} in ${line.count} rounds, more than r\u2032 = ${rule.patience}` : "detected";
  const scores = line.scores;
  if (!scores || scores.beta === null) return `NFL suspected: ${why}; the gain is not known`;
  return `NFL suspected: ${why}; gain over training alone in this round ${gain(scores.beta, run.percent)} on average, ${scores.clearly_harmed} of ${scores.clients.length} clients clearly worse off`;
}

export function statistic(run: Run): string {
  return !run.rule || run.rule.statistic === "delta" ? "Delta" : `the ${run.rule.statistic} divergence`;
}

// Label, colour and rank of an event in a chart.
const MARKS: Partial<Record<Happening["kind"], [string, string, number]>> = {
  hurts: ["hurts", "harm", 0],
  helps: ["helps", "good", 0],
  detected: ["NFL suspected", "central", 0],
  on: ["recovery on", "recover", 1],
  off: ["recovery off", "ink-soft", 1],
  warning: ["warning", "central", 2],
  undecided: ["undecided", "ink-soft", 3],
  begins: ["test begins", "ink-soft", 4],
};

/** The events of a chart; those of one round are one mark, in the colour of the most important. */
export function marks(run: Run): Mark[] {
  const found = new Map<number, { words: string[]; colour: string; rank: number }>();
  for (const one of happenings(run)) {
    const [words, colour, rank] = MARKS[one.kind] ?? [];
    if (words === undefined || colour === undefined || rank === undefined) continue;
    const before = found.get(one.round);
    const first = !before || rank < before.rank;
    found.set(one.round, { words: [...(before?.words ?? []), words], colour: first ? colour : before.colour, rank: first ? rank : before.rank });
  }
  return [...found].sort(([a], [b]) => a - b).map(([round, { words, colour, rank }]) => ({ round, label: `${words.join(", ")}: ${round}`, colour, rank }));
}

export function spells(run: Run): { from: number; to: number }[] {
  const found: { from: number; to: number }[] = [];
  if (!run.adapts) return found;
  let last: { from: number; to: number } | null = null;
  for (const line of run.rounds) {
    if (!line.recovering) last = null;
    else if (last) last.to = line.round;
    else found.push((last = { from: line.round, to: line.round }));
  }
  return found;
}

export function series(run: Run, pick: (line: Round) => number | null | undefined): (number | null)[] {
  return run.rounds.map((line) => pick(line) ?? null);
}

export function scoredSeries(run: Run, pick: (scores: Scores) => number | null | undefined): (number | null)[] {
  return series(run, (line) => (line.scores ? pick(line.scores) : null));
}

export function scored(run: Run): Round[] {
  return run.rounds.filter((line) => line.scores);
}

export function until(run: Run): number {
  return Math.max(run.planned ?? 0, run.rounds[run.rounds.length - 1]?.round ?? 0);
}

/** The last round in which NFL was suspected and all clients were scored. */
export function detection(run: Run): Round | null {
  let found: Round | null = null;
  let before = 0;
  for (const line of run.rounds) {
    if (line.detections > before && line.scores) found = line;
    before = line.detections;
  }
  return found;
}

export function className(run: Run, label: string): string {
  const name = run.class_names[Number(label)] ?? label;
  return name === "\n" ? "newline" : name === " " ? "space" : name;
}

/** Size, role and classes of a client, the largest classes first. */
export function portrait(run: Run, client: Client, most = 6): string {
  const held = Object.entries(client.labels).sort((a, b) => b[1] - a[1]);
  const classes = held.slice(0, most).map(([label, n]) => `${className(run, label)} (${n})`);
  const rest = held.length > most ? ` and ${held.length - most} more` : "";
  const role = client.attacker ? "An attacker" : "Benign";
  const named = client.name ? ` (${client.name})` : "";
  const holds = classes.length ? `; classes ${classes.join(", ")}${rest}` : "";
  return `${role}${named}, ${client.train} training and ${client.test} test samples${holds}.`;
}
