// Each client's gain beta_i over training alone, sorted: which clients are hurt, and by how much. A bar is a button.

import { el, say, svg } from "./dom";
import { gain, score } from "./numbers";
import type { Run, Round } from "./types";

export interface Bar {
  client: number;
  beta: number;
  local: number;
  clear: boolean;
  before: number | null; // the gain in the round in which NFL was suspected
}

export interface Gains {
  node: HTMLElement;
  draw(run: Run, scored: Round, before: Round | null): void;
}

const HEIGHT = 260;
const LEFT = 58;
const BELOW = 36;

export function bars(scored: Round, before: Round | null): Bar[] {
  const scores = scored.scores;
  if (!scores) return [];
  const then = new Map<number, number | null>();
  before?.scores?.clients.forEach((client, index) => then.set(client, before.scores?.betas[index] ?? null));
  const found: Bar[] = [];
  scores.clients.forEach((client, index) => {
    const beta = scores.betas[index] ?? null;
    if (beta === null) return;
    found.push({ client, beta, local: scores.locals[index] ?? 0, clear: scores.clear[index] === "1", before: then.get(client) ?? null });
  });
  return found.sort((a, b) => a.beta - b.beta || a.client - b.client);
}

export function kindOf(bar: { beta: number; clear: boolean }): string {
  if (bar.beta === 0) return "same";
  return `${bar.beta < 0 ? "worse" : "better"}${bar.clear ? " clear" : ""}`;
}

export function inWords(bar: { beta: number; clear: boolean }): string {
  if (bar.beta === 0) return "as well off as alone";
  const how = bar.beta < 0 ? "worse off than alone" : "better off than alone";
  return bar.clear ? `clearly ${how}` : `${how}, but it may be chance`;
}

export function gainChart(follow: (client: number) => void, describe: (client: number) => string): Gains {
  const picture = svg("svg", { class: "gains", role: "group", "aria-label": "Gain of each client, sorted. Arrow keys read the bars, Enter shows a client's history.", keydown: pressed });
  const tip = el("p", { class: "readout" });
  const node = el("div", { class: "gain-chart" }, picture, tip);
  let drawn: { run: Run; found: Bar[]; scored: Round; before: Round | null } | null = null;
  let chosen = 0;

  function draw(run: Run, scored: Round, before: Round | null): void {
    drawn = { run, scored, before, found: bars(scored, before) };
    paint();
    rest();
  }

  function paint(): void {
    const width = node.clientWidth;
    if (!drawn || width === 0) return;
    const { found, run } = drawn;
    const scale = run.percent ? 100 : 1;
    const values = [0, ...found.flatMap((bar) => [bar.beta, bar.before ?? 0])].map((value) => value * scale);
    const air = (Math.max(...values) - Math.min(...values) || 1) * 0.05;
    const low = Math.min(...values) - air;
    const high = Math.max(...values) + air;
    const ticks = niceTicks(low, high);
    const y = (value: number): number => 8 + ((high - value) / (high - low || 1)) * (HEIGHT - BELOW - 8);
    const step = (width - LEFT - 8) / Math.max(1, found.length);
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    picture.setAttribute("width", String(width));
    picture.setAttribute("height", String(HEIGHT));
    picture.replaceChildren(
      ...ticks.flatMap((tick) => [
        svg("line", { x1: LEFT, x2: width - 8, y1: y(tick), y2: y(tick), class: tick === 0 ? "zero" : "rule" }),
        svg("text", { x: LEFT - 6, y: y(tick), class: "tick" }, tick > 0 ? `+${tick}` : String(tick).replace("-", "\u2212")),
      ]),
      svg("text", { x: 14, y: (HEIGHT - BELOW) / 2, class: "axis", transform: `rotate(-90 14 ${(HEIGHT - BELOW) / 2})` }, run.percent ? "gain (points)" : "gain"),
      svg("text", { x: LEFT + (width - LEFT) / 2, y: HEIGHT - 6, class: "axis" }, "clients, from the most hurt to the best off"),
      ...found.map((bar, index) => {
        const x = LEFT + index * step;
        const top = Math.min(y(0), y(bar.beta * scale));
        const tall = Math.max(1.5, Math.abs(y(0) - y(bar.beta * scale)));
        const group = svg("g", { class: `bar ${kindOf(bar)}`, role: "button", tabindex: index === chosen ? 0 : -1, "aria-label": sentence(bar), "data-client": bar.client, click: () => follow(bar.client), pointerenter: () => read(index, false), focus: () => read(index, true), pointerleave: rest });
        group.append(
          svg("rect", { x, y: 4, width: step, height: HEIGHT - BELOW - 4, class: "reach" }),
          svg("rect", { x: x + step * 0.1, y: top, width: Math.max(1, step * 0.8), height: tall, class: "value" }),
        );
        if (bar.before !== null) {
          group.append(svg("circle", { cx: x + step / 2, cy: y(bar.before * scale), r: Math.min(4, Math.max(1.5, step / 3)), class: "before" }));
        }
        if (step > 18) group.append(svg("text", { x: x + step / 2, y: HEIGHT - BELOW + 14, class: "who" }, String(bar.client)));
        return group;
      }),
    );
  }

  function sentence(bar: Bar): string {
    if (!drawn) return "";
    const percent = drawn.run.percent;
    const then = bar.before === null ? "" : `, ${gain(bar.before, percent)} in round ${drawn.before?.round}`;
    const alone = score(bar.local - bar.beta, percent);
    return `Client ${bar.client}: gain ${gain(bar.beta, percent)}${then} (${score(bar.local, percent)} against ${alone} alone), ${inWords(bar)}. ${describe(bar.client)}`;
  }

  function read(index: number, aloud: boolean): void {
    const bar = drawn?.found[index];
    if (!bar) return;
    tip.textContent = sentence(bar);
    if (aloud) chosen = index;
  }

  function rest(): void {
    tip.textContent = drawn?.found.length ? "Point at a bar to read about its client; click, or press Enter, to see the client's history." : "No gain is known in this round.";
  }

  function pressed(event: KeyboardEvent): void {
    const found = drawn?.found ?? [];
    const next = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: found.length - 1 }[event.key];
    const bar = found[chosen];
    if ((event.key === "Enter" || event.key === " ") && bar) {
      event.preventDefault();
      follow(bar.client);
      say(`History of client ${bar.client}`);
    } else if (next !== undefined) {
      event.preventDefault();
      chosen = Math.max(0, Math.min(found.length - 1, next));
      const groups = picture.querySelectorAll<SVGGElement>("g.bar");
      groups.forEach((group, index) => group.setAttribute("tabindex", index === chosen ? "0" : "-1"));
      groups[chosen]?.focus();
    }
  }

  new ResizeObserver(paint).observe(node);
  return { node, draw };
}

/** Round numbers between two values, zero among them where it lies there. */
export function niceTicks(low: number, high: number): number[] {
  const span = high - low || 1;
  const raw = span / 6;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= raw) ?? raw;
  const digits = Math.max(0, 1 - Math.floor(Math.log10(step)));
  const found: number[] = [];
  for (let n = Math.ceil(low / step); n <= Math.floor(high / step); n += 1) found.push(Number((n * step).toFixed(digits)) + 0);
  return found;
}
