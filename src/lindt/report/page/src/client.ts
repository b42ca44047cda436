// The view of one client: its size, classes and role, its score against training alone, the rounds in which it answered.

import { el } from "./dom";
import { inWords } from "./gains";
import { lineChart } from "./lines";
import { count, gain, score, tick } from "./numbers";
import { marks, portrait, spells, until } from "./story";
import type { Run } from "./types";

export interface Followed {
  node: HTMLElement;
  draw(run: Run): void;
}

export function followed(view: string, number: number, close: () => void): Followed {
  const chart = lineChart(view, `Local score of client ${number} over rounds, against training alone`, 200);
  const text = el("p", {});
  const standing = el("p", {});
  const title = el("h3", { tabindex: -1 }, `Client ${number}`);
  const closing = el("button", { type: "button", class: "quiet", click: close }, "Close");
  const node = el("section", { class: "followed", "aria-label": `Client ${number}`, "data-client": number }, el("div", { class: "row" }, title, closing), text, standing, chart.node);

  function draw(run: Run): void {
    const client = run.clients.find((one) => one.client === number);
    text.textContent = client ? portrait(run, client, 20) : "This client is not described in run.json.";
    const at = run.rounds.map((line) => line.scores?.clients.indexOf(number) ?? -1);
    const local = run.rounds.map((line, index) => line.scores?.locals[at[index] ?? -1] ?? null);
    const alone = run.rounds.map((line, index) => {
      const beta = line.scores?.betas[at[index] ?? -1] ?? null;
      const mine = local[index] ?? null;
      return beta === null || mine === null ? null : mine - beta;
    });
    standing.textContent = whereItStands(run, client?.attacker ?? false, at);
    chart.draw({
      rounds: run.rounds.map((line) => line.round),
      until: until(run),
      lines: [
        { label: "local", values: local, colour: "local" },
        { label: "alone", values: alone, colour: "alone", dash: [6, 4] },
      ],
      label: run.percent ? `${run.metric} (%)` : run.metric,
      format: (value) => score(value, run.percent),
      tick: (value) => tick(value, run.percent),
      marks: marks(run),
      shaded: spells(run),
    });
  }

  function whereItStands(run: Run, attacker: boolean, at: number[]): string {
    const asked = run.rounds.filter((line) => line.asked.includes(number));
    const answered = run.rounds.filter((line) => line.answered.includes(number));
    const refused = run.rounds.filter((line) => line.refused.some((one) => one.client === number));
    const treated = answered.filter((line) => line.recovering);
    const turns = `It was asked in ${count(asked.length, "round")} and answered in ${answered.length}${run.adapts ? `, ${treated.length} of them with recovery on` : ""}${refused.length ? `; ${count(refused.length, "update")} refused` : ""}.`;
    let last = at.length - 1;
    while (last >= 0 && (at[last] ?? -1) < 0) last -= 1;
    const scores = run.rounds[last]?.scores;
    const beta = scores?.betas[at[last] ?? -1] ?? null;
    if (!scores || beta === null) return attacker ? `Attackers are left out of the scores. ${turns}` : `No gain is known yet. ${turns}`;
    const clear = scores.clear[at[last] ?? -1] === "1";
    return `In round ${run.rounds[last]?.round} its gain is ${gain(beta, run.percent)}: ${inWords({ beta, clear })}. ${turns}`;
  }

  return { node, draw };
}
