// Written by lindt/report/typescript.py from lindt/runs/schema.py: change the fields there, then run `make page`.
// Rates and gains are fractions.

export type Statistic = "delta" | "clean" | "spread" | "median";

export interface Refusal {
  client: number;
  reason: string;
}

export interface Decision {
  state: string;
  since: number | null;
  gain: number | null;
  error: number | null;
  clients: number;
  samples: number;
  needed: number | null;
}

export interface Detection {
  verdict: Decision;
  warning: number | null;
  recovery: Decision | null;
  recovered: Decision | null;
}

export interface Scores {
  central: number | null;
  local: number;
  private: number | null;
  beta: number | null;
  worst_tenth: number | null;
  median_gain: number | null;
  ipr: number | null;
  attack_central: number | null;
  attack_local: number | null;
  harmed: number | null;
  clearly_harmed: number | null;
  clearly_better: number | null;
  ties: number | null;
  clients: number[];
  locals: number[];
  betas: (number | null)[];
  clear: string;
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
  scores: Scores | null;
  detection: Detection | null;
  seconds: number | null;
}

export interface Summary {
  scored_rounds: number;
  central: number | null;
  local: number | null;
  private: number | null;
  beta: number | null;
  worst_tenth: number | null;
  median_gain: number | null;
  ipr: number | null;
  attack_central: number | null;
  attack_local: number | null;
  harmed: number | null;
  clearly_harmed: number | null;
  clearly_better: number | null;
  ties: number | null;
  counted_clients: number;
}
