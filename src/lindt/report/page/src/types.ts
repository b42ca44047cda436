// What the page is given: the values of lindt/report/payload.py. Rates and gains are fractions.

export interface Refusal {
  client: number;
  reason: string;
}

export interface Scores {
  central: number;
  local: number;
  private: number | null;
  beta: number | null;
  clearly_harmed: number | null;
  harmed: number | null;
  worst_tenth: number | null;
  attack_central: number | null;
  attack_local: number | null;
  clients: number[]; // who was counted; the next three go with it, one each
  locals: number[];
  betas: (number | null)[];
  clear: string; // "1" where the paired test says that beta_i is no chance
  notes: Record<string, number>;
}

export interface Round {
  round: number;
  asked: number[];
  answered: number[];
  refused: Refusal[];
  delta: number | null;
  clean: number | null;
  spread: number | null;
  median: number | null;
  recovering: boolean;
  flag: boolean;
  count: number;
  detections: number;
  seconds: number | null;
  scores: Scores | null;
}

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
  statistic: "delta" | "clean" | "spread" | "median";
  counting: string;
}

export interface Summary {
  scored_rounds: number;
  central: number | null;
  local: number | null;
  private: number | null;
  beta: number | null;
  clearly_harmed: number | null;
  counted_clients: number;
  attack_central: number | null;
  attack_local: number | null;
}

export interface Privacy {
  words: string;
  epsilon: number | null;
  delta: number | null;
  sigma: number | null;
  S: number | null;
}

/** What changes while a run goes on. */
export interface Progress {
  id: string;
  state: "running" | "ended" | "crashed";
  verdict: { tone: string; headline: string; sentence: string };
  said: string[];
  summary: Summary | null;
  privacy: Privacy;
  rounds: Round[];
}

export interface Run extends Progress {
  name: string;
  method: string;
  seed: number | null;
  group: string; // the same for runs that differ in their seed alone
  planned: number | null;
  percent: boolean;
  metric: string;
  rule: Rule | null;
  adapts: boolean;
  relabel: boolean; // whether anybody attacks with wrong labels
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
  method?: string;
  seed?: number | null;
  round?: number;
  rounds?: number | null;
  delta?: number | null;
  beta?: number | null;
  clearly_harmed?: number | null;
  counted_clients?: number | null;
  metric_in_percent?: boolean;
  verdict: string;
  tone?: string;
}
