// What happened in a run, read from its rounds: events, spells of recovery, series.

import type { Mark } from "./lines";
import { gain } from "./numbers";
import type { Client, Round, Run, Scores } from "./types";

export interface Happening {
  round: number;
  kind: "detected" | "on" | "off" | "refused" | "nobody";
  text: string;
}

export function happenings(run: Run): Happening[] {
  const found: Happening[] = [];
  let before = { detections: 0, recovering: false, flag: false };
  for (const line of run.rounds) {
    if (line.detections > before.detections) found.push({ round: line.round, kind: "detected", text: detected(run, line) });
    if (run.adapts && line.recovering && !before.recovering) found.push({ round: line.round, kind: "on", text: "recovery on: the clients train a model of their own along with the shared one" });
    if (run.adapts && before.flag && !line.flag) found.push({ round: line.round, kind: "off", text: "recovery off: the clients go on as in FedAvg" });
    for (const one of line.refused) found.push({ round: line.round, kind: "refused", text: `the update of client ${one.client} was refused: ${one.reason}` });
    if (!line.answered.length) found.push({ round: line.round, kind: "nobody", text: "no valid update came back, the old weights were kept" });
    before = line;
  }
  return found;
}

function detected(run: Run, line: Round): string {
  const rule = run.rule;
  const why = rule ? `${statistic(run)} was above epsilon = ${rule.epsilon} in ${line.count} rounds, more than r\u2032 = ${rule.patience}` : "detected";
  const scores = line.scores;
  if (!scores || scores.beta === null) return `NFL suspected: ${why}; the gain is not known`;
  const word = scores.beta < 0 ? "confirmed" : "not confirmed";
  return `NFL suspected and ${word}: ${why}; mean gain ${gain(scores.beta, run.percent)}, ${scores.clearly_harmed} of ${scores.clients.length} clients clearly worse off`;
}

export function statistic(run: Run): string {
  return !run.rule || run.rule.statistic === "delta" ? "Delta" : `the ${run.rule.statistic} divergence`;
}

export function marks(run: Run): Mark[] {
  const words = { detected: "NFL detected", on: "recovery on", off: "recovery off" };
  const colours = { detected: "harm", on: "recover", off: "ink-soft" };
  return happenings(run).flatMap((one) => {
    if (one.kind === "refused" || one.kind === "nobody") return [];
    return [{ round: one.round, label: `${words[one.kind]}: ${one.round}`, colour: colours[one.kind] }];
  });
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

/** The last round in which NFL was suspected and everyone was asked. */
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
