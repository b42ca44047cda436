// The parts of a run's page below the gains: answers, attach points, labels, privacy, attack, plan.

import { copyButton, el } from "./dom";
import { cellGrid } from "./grid";
import { lineChart } from "./lines";
import type { Line } from "./lines";
import { count, duration, known, mean, power, score, small, tick } from "./numbers";
import { className, happenings, marks, scored, scoredSeries, spells, until } from "./story";
import { colour } from "./theme";
import type { Run } from "./types";

export interface Panel {
  title: string;
  about: string;
  node: HTMLElement;
  draw(run: Run): boolean; // false: there is nothing to show, and `absent` says why
  absent: string;
}

const PALETTE = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6", "series-7"];
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const FAINTEST = 1e-9; // a smaller gradient is drawn at this value: nothing is learned from it

export function panels(view: string): Panel[] {
  return [answers(), attachPoints(view), labels(), privacy(), attack(view), plan()];
}

function answers(): Panel {
  const grid = cellGrid("Clients that answered, by round", (rows) => (rows > 60 ? 5 : rows > 30 ? 9 : 14));
  const total = el("p", {});
  const key = el("p", { class: "key" }, swatch("local", "answered"), swatch("late", "asked, answer not counted"), swatch("harm", "refused"), el("span", {}, el("i", { class: "triangle" }), "attacker"));
  const list = el("ul", {});
  const more = el("details", {}, el("summary", {}, "Refused updates"), list);
  const node = el("div", {}, key, grid.node, total, more);
  return {
    title: "Clients that answered",
    about: "A column is a round, a row is a client.",
    absent: "No round was played yet.",
    node,
    draw(run) {
      if (!run.rounds.length) return false;
      const clients = run.clients.map((one) => one.client);
      const attackers = new Set(run.clients.filter((one) => one.attacker).map((one) => one.client));
      const lookup = run.rounds.map((line) => ({ asked: new Set(line.asked), answered: new Set(line.answered), refused: new Map(line.refused.map((one) => [one.client, one.reason])) }));
      const paints = { answered: colour("local"), late: colour("late"), refused: colour("harm") };
      grid.draw({
        columns: run.rounds.length,
        rows: clients.length,
        columnTitle: "round",
        rowTitle: "client",
        columnName: (column) => String(run.rounds[column]?.round ?? ""),
        rowName: (row) => String(clients[row]),
        marked: (row) => attackers.has(clients[row] ?? -1),
        loud: (column, row) => lookup[column]?.refused.has(clients[row] ?? -1) ?? false,
        paint(column, row) {
          const client = clients[row] ?? -1;
          const one = lookup[column];
          if (!one) return null;
          if (one.refused.has(client)) return paints.refused;
          if (one.answered.has(client)) return paints.answered;
          return one.asked.has(client) ? paints.late : null;
        },
        describe(column, row) {
          const line = run.rounds[column];
          const one = lookup[column];
          const client = clients[row] ?? -1;
          if (!line || !one) return "";
          const reason = one.refused.get(client);
          const what = reason !== undefined ? `its update was refused: ${reason}` : one.answered.has(client) ? "answered" : one.asked.has(client) ? "was asked, but its answer does not count" : "was not asked";
          return `Round ${line.round}, client ${client}${attackers.has(client) ? " (attacker)" : ""}: ${what}. Answered: ${line.answered.join(", ") || "no client"}.`;
        },
        hint: "Point at a cell, or use the arrow keys, to read it.",
      });
      const refusals = happenings(run).filter((one) => one.kind === "refused" || one.kind === "nobody");
      const answered = run.rounds.reduce((sum, line) => sum + line.answered.length, 0);
      total.textContent = `${count(answered, "answer")} in ${count(run.rounds.length, "round")}; ${count(run.rounds.reduce((sum, line) => sum + line.refused.length, 0), "update")} refused.`;
      more.hidden = !refusals.length;
      list.replaceChildren(...refusals.slice(0, 200).map((one) => el("li", {}, `round ${one.round}: ${one.text}`)));
      return true;
    },
  };
}

function attachPoints(view: string): Panel {
  const scores = lineChart(view, "Mean score at each attach point", 220);
  const gradients = lineChart(view, "Gradient norm of v at each attach point", 220);
  const weights = lineChart(view, "Weight of each model in guarded prediction", 180);
  const others = lineChart(view, "Other values that the method logs", 180);
  const found = el("p", { class: "found" });
  const node = el("div", {}, found, scores.node, gradients.node, weights.node, others.node);
  return {
    title: "Scores and gradients at the attach points",
    about: "An attach point is a layer at which a client's own model v joins the shared model. A score of 1: v adds nothing there. A gradient of 0: v learns nothing there. Means over the clients, each in its last round.",
    absent: "This method has no attach points, or its clients have not trained a model of their own yet.",
    node,
    draw(run) {
      const names = [...new Set(scored(run).flatMap((line) => Object.keys(line.scores?.notes ?? {})))].sort();
      const kinds: [typeof scores, string[], string, boolean][] = [
        [scores, names.filter((name) => name.startsWith("score/")), "mean score", false],
        [gradients, names.filter((name) => name.startsWith("gradient/")), "gradient norm of v", true],
        [weights, names.filter((name) => name.startsWith("weight/")), "weight in the prediction", false],
        [others, names.filter((name) => !name.includes("/")), "mean over clients", false],
      ];
      found.textContent = headAlone(scored(run)[scored(run).length - 1]?.scores?.notes ?? {});
      found.hidden = !found.textContent;
      for (const [chart, mine, label, log] of kinds) {
        chart.node.hidden = !mine.length;
        if (!mine.length) continue;
        const lines: Line[] = mine.map((name, index) => ({
          label: pointName(name),
          values: scoredSeries(run, (one) => one.notes[name]).map((value) => (log && value !== null ? Math.max(value, FAINTEST) : value)),
          colour: PALETTE[index % PALETTE.length] ?? "series-1",
          dash: DASHES[index % DASHES.length] ?? [],
        }));
        chart.draw({ rounds: run.rounds.map((line) => line.round), until: until(run), lines, label, log, format: (value) => (log ? (value <= FAINTEST ? "<1e\u22129" : small(value)) : value.toFixed(4)), tick: log ? power : small, marks: marks(run), shaded: spells(run), ...(log ? {} : { top: 1 }) });
      }
      return names.length > 0;
    },
  };
}

/** The name of a note without its kind: of score/head "head". A layer of nn.Sequential is a number, here "layer 1". */
function pointName(note: string): string {
  const name = note.replace(/^[a-z]+\//, "");
  return /^\d/.test(name) ? `layer ${name}` : name;
}

const NOTHING_ADDED = 0.999; // a score from here on: v's part is below one in a thousand

/** The attach points where v adds nothing, in words: often v is only a new head on the shared model. */
function headAlone(notes: Record<string, number>): string {
  const scores = Object.entries(notes).filter(([name]) => name.startsWith("score/"));
  const idle = scores.filter(([, value]) => value >= NOTHING_ADDED).map(([name]) => pointName(name));
  if (!idle.length) return "";
  if (idle.length < scores.length) return `At ${idle.join(", ")} the score is 1 to within 0.001: the client's own model adds nothing there.`;
  if (!("gradient/head" in notes)) return "Every score is 1 to within 0.001: the client's own model adds nothing at the attach points.";
  return "Only the head is adapted: every score is 1 to within 0.001, so a client's own model differs from the shared model only in the layers after the last attach point.";
}

function labels(): Panel {
  const grid = cellGrid("Label distribution per client", (rows) => (rows > 40 ? 9 : 16));
  const key = el("p", { class: "key" });
  const node = el("div", {}, key, grid.node);
  return {
    title: "Classes of each client",
    about: "Training samples of each class at each client. A stronger colour means more samples, on a logarithmic scale. Empty: no samples.",
    absent: "The targets of this task are not classes.",
    node,
    draw(run) {
      const classes = [...new Set(run.clients.flatMap((one) => Object.keys(one.labels)))].sort((a, b) => Number(a) - Number(b));
      if (!classes.length) return false;
      const most = Math.max(2, ...run.clients.flatMap((one) => Object.values(one.labels)));
      const shades = [1, 2, 3, 4, 5, 6].map((n) => colour(`heat-${n}`));
      const shade = (n: number): string => shades[Math.min(5, Math.floor((Math.log(n) / Math.log(most)) * 5.999))] ?? "";
      key.replaceChildren(...shades.map((_, n) => {
        const from = Math.max(1, Math.ceil(most ** (n / 6) - 1e-9));
        return swatch(`heat-${n + 1}`, n === 5 ? `${from} to ${most}` : n === 0 ? "1" : `from ${from}`);
      }));
      grid.draw({
        columns: run.clients.length,
        rows: classes.length,
        columnTitle: "client",
        rowTitle: "class",
        columnName: (column) => String(run.clients[column]?.client ?? ""),
        rowName: (row) => className(run, classes[row] ?? ""),
        paint(column, row) {
          const n = run.clients[column]?.labels[classes[row] ?? ""] ?? 0;
          return n > 0 ? shade(n) : null;
        },
        describe(column, row) {
          const one = run.clients[column];
          if (!one) return "";
          const n = one.labels[classes[row] ?? ""] ?? 0;
          return `Client ${one.client}${one.name ? ` (${one.name})` : ""}${one.attacker ? " (attacker)" : ""}: ${count(n, "training sample")} of class ${className(run, classes[row] ?? "")}; ${one.train} in all, ${count(Object.keys(one.labels).length, "class").replace(/classs$/, "classes")}.`;
        },
        hint: "Point at a cell, or use the arrow keys, to read it.",
      });
      return true;
    },
  };
}

function privacy(): Panel {
  const words = el("p", {});
  const table = el("dl", {});
  return {
    title: "Privacy budget spent",
    about: "Differential privacy: one client's data change the probability of any result by a factor of at most e^epsilon, except with probability delta. This epsilon and delta are not the detector's epsilon and Delta.",
    absent: "",
    node: el("div", {}, words, table),
    draw(run) {
      const { privacy: spent } = run;
      words.textContent = spent.words;
      const { epsilon, delta, sigma, S } = spent;
      const facts: [string, number | null][] = [["differential privacy's epsilon", epsilon], ["differential privacy's delta", sigma || epsilon !== null ? delta : null], ["noise sigma", sigma], ["clipped to S", S]]; // without noise delta says nothing
      table.replaceChildren(...facts.flatMap(([name, value]) => (value === null ? [] : [el("div", {}, el("dt", {}, name), el("dd", {}, small(value)))])));
      return true;
    },
  };
}

function attack(view: string): Panel {
  const chart = lineChart(view, "Attack success rate", 230);
  return {
    title: "Attack success",
    about: "The attackers want certain test samples to get a certain label. The chart shows the share of these samples that get it.",
    absent: "No client attacks in this run, or no round with an attack was scored yet.",
    node: chart.node,
    draw(run) {
      const shared = scoredSeries(run, (one) => one.attack_central);
      const own = scoredSeries(run, (one) => one.attack_local);
      if (!known(shared).length && !known(own).length) return false;
      chart.draw({
        rounds: run.rounds.map((line) => line.round),
        until: until(run),
        lines: [
          { label: "on the shared model", values: shared, colour: "central", dash: [6, 4] },
          { label: "on the clients' predictions", values: own, colour: "local" },
        ],
        label: "success (%)",
        format: (value) => score(value, true),
        tick: (value) => tick(value, true),
        marks: marks(run),
        shaded: spells(run),
      });
      return true;
    },
  };
}

function plan(): Panel {
  const command = el("code", {});
  const text = el("pre", { tabindex: 0 });
  const facts = el("p", {});
  const node = el(
    "div",
    {},
    el("div", { class: "row command" }, command, copyButton(() => command.textContent ?? "")),
    facts,
    el("details", {}, el("summary", {}, "plan.toml: everything that decides the numbers"), copyButton(() => text.textContent ?? ""), text),
  );
  return {
    title: "Repeat this run",
    about: "The plan below and this command give the same numbers on the same machine and versions.",
    absent: "",
    node,
    draw(run) {
      command.textContent = run.command;
      text.textContent = run.plan;
      const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
      const took = known(run.rounds.map((line) => line.seconds));
      const each = mean(took);
      const pace = each === null ? "" : ` ${count(took.length, "round")} took ${duration(took.reduce((a, b) => a + b, 0))}, ${duration(each)} each.`;
      facts.textContent = `Computed with ${versions.join(", ") || "unknown versions"}.${pace}`;
      return true;
    },
  };
}

function swatch(name: string, text: string): HTMLElement {
  const mark = el("i", { class: "cell" });
  mark.style.background = `var(--${name})`;
  return el("span", {}, mark, text);
}
