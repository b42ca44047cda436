// The page: chooses the view from the address's hash (#run=..., several: #run=...&run=...) and gives it the runs.

import { compareView } from "./compare";
import { el, say } from "./dom";
import { listing } from "./listing";
import { runView } from "./runview";
import { source } from "./source";
import { themeButton } from "./theme";
import type { Run } from "./types";

const from = source();
const top = document.getElementById("top") as HTMLElement;
const page = document.getElementById("page") as HTMLElement;
const connection = el("span", { class: "connection", role: "status" });
const crumbs = el("nav", { "aria-label": "Runs" });
let stop = (): void => undefined;
let turn = 0; // counts views: a view that loads more slowly than a later one is not shown

top.append(el("span", { class: "brand" }, "lindt"), crumbs, connection, themeButton());

function address(ids: string[]): string {
  const query = new URLSearchParams();
  ids.forEach((id) => query.append("run", id));
  return `#${query}`;
}

function open(ids: string[]): void {
  location.hash = address(ids);
}

async function show(): Promise<void> {
  const mine = (turn += 1);
  stop();
  const asked = new URLSearchParams(location.hash.slice(1)).getAll("run");
  page.replaceChildren(el("p", { class: "state" }, "Loading."));
  try {
    const everything = await from.runs();
    const ids = asked.length ? asked : everything.map((run) => run.id);
    crumb(ids, everything.map((run) => run.id));
    if (!ids.length && from.live) return await showList(mine);
    const runs = await Promise.all(ids.map((id) => from.run(id)));
    if (mine !== turn) return;
    if (runs.length === 1 && runs[0]) showRun(runs[0]);
    else showSeveral(runs);
  } catch (error) {
    if (mine !== turn) return;
    const reason = error instanceof Error ? error.message : String(error);
    page.replaceChildren(el("p", { class: "state" }, `This cannot be shown: ${reason}`), el("p", {}, el("button", { type: "button", click: () => void show() }, "Try again")));
  }
}

async function showList(mine: number): Promise<void> {
  const list = listing(open);
  const briefs = await from.briefs();
  if (mine !== turn) return;
  list.draw(briefs);
  page.replaceChildren(list.node);
  document.title = "lindt: runs";
  stop = from.follow([], { list: list.draw, progress: () => undefined, connection: connected });
}

function showRun(run: Run): void {
  const view = runView();
  page.replaceChildren(view.node);
  view.draw(run);
  document.title = `${run.verdict.headline}: ${run.id}`;
  let state = run.state;
  let headline = run.verdict.headline;
  const follow = (): void => {
    stop = from.follow([run.id], {
      list: () => undefined,
      progress(_, next) {
        view.draw(next);
        document.title = `${next.verdict.headline}: ${next.id}`;
        if (next.verdict.headline !== headline || next.state !== state) say(next.verdict.sentence);
        headline = next.verdict.headline;
        state = next.state;
      },
      connection: connected,
    });
  };
  follow();
}

function showSeveral(runs: Run[]): void {
  const now = new Map(runs.map((run) => [run.id, run]));
  let waiting = false;
  const draw = (): void => {
    waiting = false;
    const measure = page.querySelector<HTMLInputElement>(".choice input:checked")?.parentElement?.textContent;
    page.replaceChildren(compareView([...now.values()], (id) => open([id])));
    page.querySelectorAll<HTMLLabelElement>(".choice label").forEach((label) => {
      if (label.textContent === measure) label.querySelector("input")?.click();
    });
  };
  draw();
  document.title = `lindt: ${runs.length} runs compared`;
  stop = from.follow([...now.keys()], {
    list: () => undefined,
    progress(id, run) {
      now.set(id, run);
      if (!waiting) setTimeout(draw, 500); // several runs may report at once
      waiting = true;
    },
    connection: connected,
  });
}

function crumb(ids: string[], all: string[]): void {
  const links: Node[] = [];
  if (from.live) links.push(el("a", { href: "#" }, "All runs"));
  else if (all.length > 1) links.push(el("a", { href: "#", "aria-current": ids.length > 1 ? "page" : "false" }, "Compared"));
  if (!from.live && all.length > 1) links.push(...all.map((id) => el("a", { href: address([id]), "aria-current": ids.length === 1 && ids[0] === id ? "page" : "false" }, id)));
  else if (from.live && ids.length) links.push(el("span", { class: "soft" }, ids.length === 1 ? (ids[0] ?? "") : `${ids.length} runs`));
  crumbs.replaceChildren(...links);
}

function connected(up: boolean): void {
  connection.textContent = up ? "live" : "no connection, trying again";
  connection.className = up ? "connection up" : "connection down";
}

addEventListener("hashchange", () => void show());
addEventListener("pagehide", () => stop());
void show();
