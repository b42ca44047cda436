// A line chart over rounds (uPlot), with a legend that gives the values at the cursor and names the threshold, marked
// events, bands, and a cursor that the arrow keys move. Charts of one view share their cursor.

import uPlot from "uplot";
import { el, say, svg } from "./dom";
import { placeLabels } from "./marks";
import type { Place } from "./marks";
import { colour, onTheme } from "./theme";

export interface Line {
  label: string;
  values: (number | null)[];
  colour: string; // the name of a colour in page.css
  dash?: number[];
  band?: { low: (number | null)[]; high: (number | null)[] };
}

export interface Mark {
  round: number;
  label: string;
  colour: string;
  rank: number; // where there is no room for all labels, those of a high rank are left out first
}

export interface Spec {
  rounds: number[];
  until: number; // the axis ends here
  lines: Line[];
  label: string; // of the vertical axis, with its unit
  format: (value: number) => string;
  tick?: (value: number) => string; // on the axis, where `format` has more digits than it needs
  log?: boolean;
  rule?: { value: number; label: string }; // a line across, named in the legend
  top?: number; // the axis goes at least so far up
  marks?: Mark[];
  shaded?: { from: number; to: number }[];
}

export interface Chart {
  node: HTMLElement;
  draw(spec: Spec): void;
}

const FONT = "12px system-ui, sans-serif";
const LANE = 17; // px: the height of a row of labels
const LANES = 6;
const AIR = 9; // px between the plot and the labels: half of the highest number on the vertical axis stands there
const SIDE = 80; // px: the vertical axis, with its label
const EDGE = 12; // px at the right of the plot
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const views = new Map<string, Set<(index: number | null) => void>>();

/** `view` names the charts whose cursors move together; `title` is read out. */
export function lineChart(view: string, title: string, height = 240): Chart {
  let plot: uPlot | null = null;
  let spec: Spec | null = null;
  let moving = false;
  let places: (Place | null)[] = [];
  let lanes = 0;
  const labels = el("div", { class: "marks", "aria-hidden": true });
  const legend = el("div", { class: "legend" });
  const canvas = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": title, keydown: pressed, blur: () => broadcast(null) });
  const node = el("div", { class: "chart" }, legend, canvas);

  function draw(next: Spec): void {
    const same = spec !== null && shape(spec) === shape(next);
    spec = next;
    node.dataset["points"] = String(next.rounds.length);
    canvas.setAttribute("aria-label", `${title}. Arrow keys read the rounds.`);
    if (canvas.clientWidth === 0) return;
    const high = lanes;
    if (arrange() === high && plot && same) {
      plot.setData(columns(next));
      tell(null);
    } else {
      create();
    }
  }

  /** Where the labels of marks stand; the number of lanes they take. */
  function arrange(): number {
    const wide = canvas.clientWidth - SIDE - EDGE;
    const ink = document.createElement("canvas").getContext("2d");
    if (ink) ink.font = FONT;
    const end = Math.max(2, spec?.until ?? 2);
    const flags = (spec?.marks ?? []).map((mark) => ({ x: ((mark.round - 1) / (end - 1)) * wide, width: Math.ceil(ink?.measureText(mark.label).width ?? 0) + 1, rank: mark.rank }));
    places = placeLabels(flags, -SIDE, wide + EDGE, LANES);
    lanes = Math.max(0, ...places.map((place) => (place ? place.lane + 1 : 0)));
    return lanes;
  }

  function create(): void {
    if (!spec || canvas.clientWidth === 0) return;
    arrange();
    plot?.destroy();
    plot = new uPlot(options(spec), columns(spec), canvas);
    canvas.append(labels);
    tell(null);
  }

  function options(now: Spec): uPlot.Options {
    const ink = colour("ink-soft");
    const axis = { stroke: ink, font: FONT, labelFont: FONT, labelSize: 22, grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 } };
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    for (const line of now.lines) {
      const stroke = colour(line.colour);
      const lonely = line.values.filter((value) => value !== null).length < 60;
      series.push({ label: line.label, stroke, width: 2, dash: line.dash ?? [], spanGaps: true, points: { show: lonely, size: 5, fill: stroke, stroke } });
      if (line.band) {
        const at = series.length;
        const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge, label: "high" }, { ...edge, label: "low" });
        bands.push({ series: [at, at + 1], fill: `${stroke}33` });
      }
    }
    return {
      width: canvas.clientWidth,
      height: height + lanes * LANE,
      padding: [lanes * LANE + AIR + 3, EDGE, 0, 0],
      scales: {
        x: { time: false, range: () => [1, Math.max(2, spec?.until ?? 2)] },
        y: now.log ? { distr: 3, range: (_, low, high) => decades(low, high) } : { range: (_, low, high) => room(low, high) },
      },
      axes: [
        { ...axis, label: "round", size: 34, incrs: STEPS },
        { ...axis, label: now.label, size: SIDE - 22, space: 22, ...(now.log ? { splits: powers } : {}), values: (_, values) => values.map((value) => (value === null ? "" : (now.tick ?? now.format)(value))) },
      ],
      series,
      bands,
      legend: { show: false },
      cursor: { drag: { x: false, y: false, setScale: false }, y: false, points: { size: 8 } },
      hooks: {
        drawClear: [shade],
        draw: [annotate],
        setCursor: [(u) => !moving && broadcast(u.cursor.idx ?? null)],
      },
    };
  }

  function room(low: number | null, high: number | null): [number, number] {
    const values = [low ?? 0, high ?? 1, spec?.rule?.value ?? high ?? 1, spec?.top ?? high ?? 1];
    const bottom = Math.min(0, ...values);
    const top = Math.max(...values);
    const air = (top - bottom || 1) * 0.06;
    return [bottom < 0 ? bottom - air : 0, top + air];
  }

  function shade(u: uPlot): void {
    u.ctx.save();
    u.ctx.fillStyle = colour("recovering");
    for (const { from, to } of spec?.shaded ?? []) {
      const left = u.valToPos(from, "x", true);
      u.ctx.fillRect(left, u.bbox.top, u.valToPos(to, "x", true) - left, u.bbox.height);
    }
    u.ctx.restore();
  }

  function annotate(u: uPlot): void {
    const { ctx, bbox } = u;
    const scale = devicePixelRatio;
    if (spec?.rule) {
      const y = u.valToPos(spec.rule.value, "y", true);
      ctx.save();
      ctx.lineWidth = scale;
      ctx.strokeStyle = colour("rule");
      ctx.setLineDash([6 * scale, 4 * scale]);
      line(ctx, bbox.left, y, bbox.left + bbox.width, y);
      ctx.restore();
    }
    const [left, top, tall] = [bbox.left / scale, bbox.top / scale, bbox.height / scale];
    labels.replaceChildren(
      ...(spec?.marks ?? []).flatMap((mark, index) => {
        const place = places[index];
        const rise = place ? place.lane * LANE + LANE / 2 + AIR : 0;
        const pole = el("i", { "data-round": mark.round });
        pole.style.cssText = `left: ${left + u.valToPos(mark.round, "x")}px; top: ${top - rise}px; height: ${tall + rise}px; background: var(--${mark.colour})`;
        if (!place) return [pole];
        const label = el("span", { "data-round": mark.round }, mark.label);
        label.style.cssText = `left: ${left + place.left}px; top: ${top - (place.lane + 1) * LANE - AIR}px; color: var(--${mark.colour})`;
        return [pole, label];
      }),
    );
  }

  function broadcast(index: number | null): void {
    views.get(view)?.forEach((show) => show(index));
  }

  function follow(index: number | null): void {
    if (!plot || !spec || !node.isConnected) return;
    tell(index);
    const round = index === null ? undefined : spec.rounds[index];
    moving = true; // its own hook must not send the round around again
    if (round === undefined) plot.setCursor({ left: -10, top: -10 });
    else plot.setCursor({ left: plot.valToPos(round, "x"), top: plot.cursor.top ?? 10 });
    moving = false;
  }

  /** The legend: each line's value at the cursor, or where it ends. */
  function tell(index: number | null): string {
    if (!spec) return "";
    const at = index ?? spec.rounds.length - 1;
    const round = spec.rounds[at];
    const texts = spec.lines.map((one) => {
      let back = at; // not every round is scored: the last value up to here
      while (back > 0 && (one.values[back] ?? null) === null) back -= 1;
      const value = one.values[back] ?? null;
      return { one, text: value === null || !spec ? "\u2013" : spec.format(value) };
    });
    const entries = [
      el("span", { class: "when" }, round === undefined ? "no round yet" : `round ${round}`),
      ...texts.map(({ one, text }) => el("span", {}, swatch(one), `${one.label} `, el("b", {}, text))),
      spec.rule && el("span", {}, swatch({ colour: "rule", dash: [6, 4] }, 1), spec.rule.label),
    ];
    legend.replaceChildren(...entries.filter((entry) => entry !== undefined));
    return `round ${round}: ${texts.map(({ one, text }) => `${one.label} ${text}`).join(", ")}`;
  }

  function pressed(event: KeyboardEvent): void {
    if (!plot || !spec || !spec.rounds.length) return;
    const last = spec.rounds.length - 1;
    const at = plot.cursor.idx ?? last;
    const stride = event.shiftKey ? 10 : 1;
    const next = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: last, Escape: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (event.key === "Escape") return broadcast(null);
    const index = Math.max(0, Math.min(last, next));
    broadcast(index);
    say(tell(index));
  }

  const charts = views.get(view) ?? new Set();
  views.set(view, charts.add(follow));
  new ResizeObserver(() => {
    if (!spec || canvas.clientWidth === 0) return;
    const high = lanes;
    if (plot && arrange() === high) plot.setSize({ width: canvas.clientWidth, height: height + lanes * LANE });
    else create();
  }).observe(canvas);
  onTheme(node, create);
  return { node, draw };
}

/** Start a new view: the cursors of the charts of the view before are no longer moved. */
export function forget(view: string): void {
  views.delete(view);
}

function columns(spec: Spec): uPlot.AlignedData {
  const found: (number | null)[][] = [spec.rounds];
  for (const line of spec.lines) {
    found.push(line.values);
    if (line.band) found.push(line.band.high, line.band.low);
  }
  return found as uPlot.AlignedData;
}

/** A chart with the same lines gets new values; a chart with other lines is built again. */
function shape(spec: Spec): string {
  const lines = spec.lines.map((line) => [line.label, line.colour, line.band !== undefined, line.values.filter((v) => v !== null).length < 60]);
  return JSON.stringify([lines, spec.label, spec.log]);
}

function decades(low: number | null, high: number | null): [number, number] {
  const bottom = Math.floor(Math.log10(Math.max(low ?? 1e-3, 1e-12)));
  const top = Math.ceil(Math.log10(Math.max(high ?? 1, 1e-11)) + 0.05);
  return [10 ** bottom, 10 ** Math.max(top, bottom + 1)];
}

/** Powers of ten, not all of them where there are many. */
function powers(_: uPlot, __: number, low: number, high: number): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first) / 5));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, n) => 10 ** (last - n * step)).reverse();
}

function line(ctx: CanvasRenderingContext2D, x1: number, y1: number, x2: number, y2: number): void {
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}

function swatch(one: { colour: string; dash?: number[] }, width = 3): Element {
  const stroke = svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": width, "stroke-dasharray": (one.dash ?? []).join(" ") });
  stroke.style.stroke = `var(--${one.colour})`;
  return svg("svg", { class: "swatch", width: 26, height: 8, "aria-hidden": "true" }, stroke);
}
