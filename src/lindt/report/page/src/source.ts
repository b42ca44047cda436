// Where runs come from: embedded in a report, or from `lindt watch` with events as they happen.

import type { Brief, Progress, Run } from "./types";

export interface Source {
  live: boolean;
  runs(): Promise<Run[]>; // in a report: all runs; live: no runs before they are asked for
  briefs(): Promise<Brief[]>;
  run(id: string): Promise<Run>;
  /** Tell of changes until the returned function is called. */
  follow(ids: string[], heard: Heard): () => void;
}

export interface Heard {
  list(briefs: Brief[]): void;
  progress(id: string, run: Run): void;
  connection(up: boolean): void;
}

export function source(): Source {
  const embedded: { runs: Run[] } | null = JSON.parse(document.getElementById("data")?.textContent ?? "null");
  return embedded ? report(embedded.runs) : live();
}

function report(runs: Run[]): Source {
  return {
    live: false,
    runs: async () => runs,
    briefs: async () => [],
    run: async (id) => {
      const found = runs.find((run) => run.id === id);
      if (!found) throw new Error(`This report has no run ${id}.`);
      return found;
    },
    follow: () => () => undefined,
  };
}

function live(): Source {
  const kept = new Map<string, Run>();

  async function ask<T>(path: string): Promise<T> {
    const answer = await fetch(path, { credentials: "same-origin" });
    if (!answer.ok) throw new Error((await answer.text()) || `The server answered ${answer.status}.`);
    return (await answer.json()) as T;
  }

  async function load(id: string): Promise<Run> {
    const run = await ask<Run>(`api/run?id=${encodeURIComponent(id)}`);
    kept.set(id, run);
    return run;
  }

  function follow(ids: string[], heard: Heard): () => void {
    const query = new URLSearchParams();
    for (const id of ids) {
      query.append("id", id);
      query.append("have", String(kept.get(id)?.rounds.length ?? 0));
    }
    const stream = new EventSource(`api/events?${query}`);
    let opened = false;
    stream.addEventListener("open", () => {
      heard.connection(true);
      // After a lost connection the server does not know what was missed: load the runs again.
      if (opened) void Promise.all(ids.map(async (id) => heard.progress(id, await load(id)))).catch(() => heard.connection(false));
      opened = true;
    });
    stream.addEventListener("error", () => heard.connection(false));
    stream.addEventListener("runs", (event) => heard.list(JSON.parse(event.data) as Brief[]));
    stream.addEventListener("more", (event) => {
      const news = JSON.parse(event.data) as Progress;
      const run = kept.get(news.id);
      if (!run) return;
      const known = run.rounds.filter((line) => !news.rounds.some((one) => one.round === line.round));
      const next: Run = { ...run, ...news, rounds: [...known, ...news.rounds].sort((a, b) => a.round - b.round) };
      kept.set(news.id, next);
      heard.progress(news.id, next);
    });
    stream.addEventListener("anew", (event) => {
      const { id } = JSON.parse(event.data) as { id: string };
      void load(id).then((run) => heard.progress(id, run), () => heard.connection(false));
    });
    return () => stream.close();
  }

  return { live: true, runs: async () => [], briefs: () => ask<Brief[]>("api/runs"), run: load, follow };
}
