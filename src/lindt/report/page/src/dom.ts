// Elements are made, never parsed from text: a name from a run's files can only ever be text.

type Child = Node | string | null | undefined | false;
type Props = Record<string, string | number | boolean | ((event: never) => void) | undefined>;

function fill(node: Element, props: Props, children: Child[]): void {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") node.addEventListener(name, value as EventListener);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child): child is Node | string => child !== null && child !== undefined && child !== false));
}

export function el<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  fill(node, props, children);
  return node;
}

export function svg<K extends keyof SVGElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): SVGElementTagNameMap[K] {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, props, children);
  return node;
}

/** Read out by a screen reader. */
export function say(text: string): void {
  const spoken = document.getElementById("spoken");
  if (spoken) spoken.textContent = text;
}

export function copyButton(text: () => string): HTMLButtonElement {
  const button = el("button", { type: "button", class: "quiet", click: () => void copy() }, "Copy");
  async function copy(): Promise<void> {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy by hand"; // a page opened from disk may not write to the clipboard
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
  return button;
}
