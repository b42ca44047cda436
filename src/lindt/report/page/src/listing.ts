// The list of runs of `lindt watch`: one click opens a run, ticks choose several to compare.

import { el } from "./dom";
import { gain, moment, small, typeset } from "./numbers";
import type { Brief } from "./types";

export interface Listing {
  node: HTMLElement;
  draw(briefs: Brief[]): void;
}

export function listing(open: (ids: string[]) => void): Listing {
  const chosen = new Set<string>();
  let shown: Brief[] = [];
  const body = el("tbody", {});
  const button = el("button", { type: "button", disabled: true, click: () => open([...chosen]) }, "Compare");
  const empty = el("p", { class: "state" }, "No runs here yet. They appear by themselves: ", el("code", {}, "lindt run"), " starts one.");
  const heads = ["", "run", "state", "gain", "clearly worse", "round", "changed", "method", "Delta"];
  const table = el("div", { class: "scroll" }, el("table", { class: "runs cards" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), body));
  const node = el("div", { class: "listing" }, el("div", { class: "row" }, el("h1", {}, "Runs"), button), empty, table);

  function count(): void {
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size < 2 ? "Tick runs to compare them" : `Compare ${chosen.size} runs`;
  }

  function draw(briefs: Brief[]): void {
    if (JSON.stringify(briefs) === JSON.stringify(shown)) return;
    shown = briefs;
    for (const id of chosen) if (!briefs.some((one) => one.run === id)) chosen.delete(id);
    empty.hidden = briefs.length > 0;
    table.hidden = !briefs.length;
    body.replaceChildren(...briefs.map(row));
    count();
  }

  function row(one: Brief): HTMLElement {
    const readable = one.state !== "unreadable";
    const tick = el("input", { type: "checkbox", "aria-label": `Compare ${one.run}`, checked: chosen.has(one.run), disabled: !readable, change: () => {
      if (tick.checked) chosen.add(one.run);
      else chosen.delete(one.run);
      count();
    } });
    const name = readable ? el("button", { type: "button", class: "link", click: () => open([one.run]) }, one.run) : el("span", {}, one.run);
    const percent = one.metric_in_percent ?? true;
    const worse = one.clearly_harmed === null || one.clearly_harmed === undefined ? "\u2013" : `${one.clearly_harmed} of ${one.counted_clients}`;
    const sentence = typeset(one.verdict.split("; ")[0] ?? "").replace(/ \([^()]* validation samples?\)$/, "");
    const shown = (text: string): string => (readable ? text : "");
    return el(
      "tr",
      { class: one.tone ?? "" },
      el("td", { class: "tick" }, tick),
      el("th", { scope: "row" }, name, one.headline && el("div", {}, one.headline), el("div", { class: "soft" }, sentence)),
      cell("state", el("span", { class: `chip ${one.state}` }, one.state)),
      cell("gain", shown(gain(one.beta, percent))),
      cell("clearly worse", shown(worse)),
      cell("round", shown(`${one.round ?? 0}${one.rounds ? ` of ${one.rounds}` : ""}`)),
      cell("changed", moment(one.changed)),
      cell("method", one.method ?? ""),
      cell("Delta", shown(small(one.delta))),
    );
  }

  count();
  return { node, draw };
}

/** A cell that names its column: on a narrow page a row is a card. */
export function cell(name: string, ...children: (Node | string)[]): HTMLElement {
  return el("td", { "data-name": name }, ...children);
}
