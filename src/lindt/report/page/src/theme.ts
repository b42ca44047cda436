// Light or dark: the system's choice unless the reader chooses. Charts ask for colours and are notified of changes.

import { el } from "./dom";

type Choice = "auto" | "light" | "dark";
const NEXT: Record<Choice, Choice> = { auto: "dark", dark: "light", light: "auto" };
const WORDS: Record<Choice, string> = { auto: "as the system", dark: "dark", light: "light" };
const listeners = new Set<() => void>();

function kept(): Choice {
  try {
    const found = localStorage.getItem("lindt-theme");
    return found === "light" || found === "dark" ? found : "auto";
  } catch {
    return "auto"; // a page opened from disk may have no storage
  }
}

export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Called after every change of colours, until the node has left the page. */
export function onTheme(node: Node, redraw: () => void): void {
  const listener = (): void => {
    if (node.isConnected) redraw();
    else listeners.delete(listener);
  };
  listeners.add(listener);
}

export function themeButton(): HTMLButtonElement {
  let choice = kept();
  const button = el("button", { type: "button", class: "quiet", click: () => apply(NEXT[choice]) });
  function apply(chosen: Choice): void {
    choice = chosen;
    if (choice === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = choice;
    button.textContent = `Colours: ${WORDS[choice]}`;
    try {
      localStorage.setItem("lindt-theme", choice);
    } catch {
      // a page without storage: the choice is not kept
    }
    listeners.forEach((listener) => listener());
  }
  apply(choice);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((listener) => listener()));
  return button;
}
