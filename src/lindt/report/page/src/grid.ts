// A grid of cells on a canvas: clients' answers by round, and clients' samples by class. One cell has the cursor; mouse
// and arrow keys move it, and its description stands below the grid.

import { el, say } from "./dom";
import { colour, onTheme } from "./theme";

export interface Cells {
  columns: number;
  rows: number;
  columnTitle: string; // the axes' labels
  rowTitle: string;
  columnName: (column: number) => string;
  rowName: (row: number) => string;
  paint: (column: number, row: number) => string | null; // a colour, or nothing
  loud?: (column: number, row: number) => boolean; // cells that stay visible when cells are very small
  marked?: (row: number) => boolean; // rows with a triangle at their side
  describe: (column: number, row: number) => string;
  hint: string;
}

export interface Grid {
  node: HTMLElement;
  draw(cells: Cells): void;
}

const FONT = "12px system-ui, sans-serif";

export function cellGrid(title: string, rowHeight: (rows: number) => number): Grid {
  let cells: Cells | null = null;
  let cursor: { column: number; row: number } | null = null;
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `${title}. Arrow keys read the cells.`, keydown: pressed, pointermove: pointed, pointerdown: pointed, pointerleave: left, blur: left });
  const said = el("p", { class: "readout" });
  const node = el("div", { class: "grid" }, canvas, said);
  let place = { x: 0, y: 0, width: 1, height: 1 };

  function draw(next: Cells): void {
    cells = next;
    node.dataset["columns"] = String(next.columns);
    paint();
    describe();
  }

  function paint(): void {
    const ctx = canvas.getContext("2d");
    if (!ctx || !cells || node.clientWidth === 0) return;
    ctx.font = FONT;
    const names = Array.from({ length: cells.rows }, (_, row) => cells?.rowName(row) ?? "");
    const wide = Math.min(120, Math.max(20, ...names.map((name) => ctx.measureText(name).width)));
    const width = node.clientWidth;
    place = { x: wide + 36, y: 4, width: width - wide - 44, height: Math.max(1, cells.rows) * rowHeight(cells.rows) };
    const height = place.height + 46;
    const scale = devicePixelRatio;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    ctx.scale(scale, scale);
    ctx.font = FONT;
    ctx.fillStyle = colour("cell");
    ctx.fillRect(place.x, place.y, place.width, place.height);
    const w = place.width / Math.max(1, cells.columns);
    const h = place.height / Math.max(1, cells.rows);
    const gap = w > 5 && h > 5 ? 1 : 0;
    const fill = (column: number, row: number, least: number): void => {
      const found = cells?.paint(column, row) ?? null;
      if (found === null) return;
      ctx.fillStyle = found;
      const [wide, tall] = [Math.max(least, w - gap), Math.max(least, h - gap)];
      ctx.fillRect(place.x + column * w - Math.max(0, wide - w) / 2, place.y + row * h - Math.max(0, tall - h) / 2, wide, tall);
    };
    const loud: [number, number][] = [];
    for (let column = 0; column < cells.columns; column += 1) {
      for (let row = 0; row < cells.rows; row += 1) {
        if (cells.loud?.(column, row)) loud.push([column, row]);
        else fill(column, row, 1);
      }
    }
    loud.forEach(([column, row]) => fill(column, row, 6));
    label(ctx, cells, names, w, h);
    if (cursor) {
      ctx.strokeStyle = colour("ink");
      ctx.lineWidth = 2;
      ctx.strokeRect(place.x + cursor.column * w, place.y + cursor.row * h, Math.max(3, w), Math.max(3, h));
    }
  }

  function label(ctx: CanvasRenderingContext2D, now: Cells, names: string[], w: number, h: number): void {
    ctx.fillStyle = colour("ink-soft");
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    const skip = [1, 2, 5, 10, 20, 50, 100].find((n) => n * h >= 14) ?? 200;
    names.forEach((name, row) => {
      const y = place.y + (row + 0.5) * h;
      if (row % skip === 0) ctx.fillText(name, place.x - 12, y, 120);
      if (now.marked?.(row)) triangle(ctx, place.x - 6, y);
    });
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    const last = now.columnName(now.columns - 1);
    const broad = ctx.measureText(last).width + 10;
    const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * w >= broad) ?? 1000;
    for (let column = 0; column < now.columns; column += 1) {
      const shown = step === 1 || Number(now.columnName(column)) % step === 0;
      const name = now.columnName(column);
      const edge = place.x + place.width + 8 - ctx.measureText(name).width / 2; // the last one stays on the canvas
      if (shown) ctx.fillText(name, Math.min(edge, place.x + (column + 0.5) * w), place.y + place.height + 5);
    }
    ctx.fillText(now.columnTitle, place.x + place.width / 2, place.y + place.height + 24);
    ctx.save();
    ctx.translate(8, place.y + place.height / 2);
    ctx.rotate(-Math.PI / 2);
    ctx.textBaseline = "middle";
    ctx.fillText(now.rowTitle, 0, 0);
    ctx.restore();
  }

  function triangle(ctx: CanvasRenderingContext2D, x: number, y: number): void {
    ctx.save();
    ctx.fillStyle = colour("harm");
    ctx.beginPath();
    ctx.moveTo(x - 4, y + 4);
    ctx.lineTo(x + 4, y + 4);
    ctx.lineTo(x, y - 4);
    ctx.fill();
    ctx.restore();
  }

  function describe(): string {
    const text = cursor && cells ? cells.describe(cursor.column, cursor.row) : (cells?.hint ?? "");
    said.textContent = text;
    return text;
  }

  function go(column: number, row: number): void {
    if (!cells || !cells.columns || !cells.rows) return;
    cursor = { column: Math.max(0, Math.min(cells.columns - 1, column)), row: Math.max(0, Math.min(cells.rows - 1, row)) };
    paint();
  }

  function left(): void {
    cursor = null;
    paint();
    describe();
  }

  function pointed(event: PointerEvent): void {
    if (!cells) return;
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - place.x) / place.width) * cells.columns);
    const row = Math.floor(((event.clientY - box.top - place.y) / place.height) * cells.rows);
    if (column < 0 || row < 0 || column >= cells.columns || row >= cells.rows) return left();
    if (cursor?.column === column && cursor.row === row) return;
    go(column, row);
    describe();
  }

  function pressed(event: KeyboardEvent): void {
    const moves: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const from = cursor ?? { column: 0, row: 0 };
    go(from.column + (cursor ? move[0] : 0), from.row + (cursor ? move[1] : 0));
    say(describe());
  }

  new ResizeObserver(paint).observe(node);
  onTheme(node, paint);
  return { node, draw };
}
