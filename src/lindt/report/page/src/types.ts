// What the page is given: the values of lindt/report/payload.py. A round and a summary follow from the run files' schema.

import type { Detection, Round, Statistic, Summary } from "./schema";

export type { Decision, Detection, Refusal, Round, Scores, Summary } from "./schema";

export interface Client {
  client: number;
  name: string;
  train: number;
  test: number;
  attacker: boolean;
  labels: Record<string, number>;
}

export interface Rule {
  epsilon: number;
  patience: number;
  statistic: Statistic;
  counting: string;
}

/** The test of the clients' reports on validation data. */
export interface GainTest {
  kind: string;
  alpha: number | null;
}

export interface Privacy {
  words: string;
  epsilon: number | null;
  delta: number | null;
  sigma: number | null;
  S: number | null;
}

/** Numbers under the verdict, written as in its sentence. */
export interface FactGroup {
  title: string;
  facts: { name: string; value: string; note: string }[];
}

/** What changes while a run goes on. */
export interface Progress {
  id: string;
  state: "running" | "ended" | "stopped" | "crashed";
  verdict: { tone: string; headline: string; sentence: string };
  facts: FactGroup[];
  said: string[];
  summary: Summary | null;
  privacy: Privacy;
  rounds: Round[];
}

export interface Run extends Progress {
  name: string;
  method: string;
  seed: number | null;
  group: string; // the same for runs that differ only in their seed
  planned: number | null;
  percent: boolean;
  metric: string;
  gains: "hits" | "samples" | "relative"; // what the test compares: hits on samples, samples won less lost, scores
  rule: Rule | null;
  test: GainTest | null;
  adapts: boolean;
  clients: Client[];
  class_names: string[];
  versions: Record<string, string>;
  plan: string;
  command: string;
}

/** A run in the list of runs. */
export interface Brief {
  run: string;
  state: string;
  changed?: number; // when, in seconds since 1970
  method?: string;
  seed?: number | null;
  round?: number;
  rounds?: number | null;
  delta?: number | null;
  beta?: number | null;
  detection?: Detection | null;
  clearly_harmed?: number | null;
  counted_clients?: number | null;
  metric_in_percent?: boolean;
  verdict: string;
  tone?: string;
  headline?: string;
}
