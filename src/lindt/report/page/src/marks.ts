// Where the labels of marked events stand: in lanes above the plot, so that no label covers another label, and no line
// that leads from the plot to a label crosses another label.

export interface Flag {
  x: number; // of its line, in px
  width: number; // of its label
  rank: number; // where there is no room for all, labels of a high rank are left out first
}

export interface Place {
  lane: number; // 0 is next to the plot
  left: number; // where the label begins
  right: number;
}

const GAP = 4; // px between a label and whatever is beside it
const MOST_LABELS = 12; // of marks that lie close together

/** Places by flag, null for a label that is left out. `flags` have different x, in order; labels lie between `left` and `right`. */
export function placeLabels(flags: Flag[], left: number, right: number, lanes: number): (Place | null)[] {
  const reach = 2 * (Math.max(0, ...flags.map((flag) => flag.width)) + 2 * GAP);
  const groups: Flag[][] = []; // labels of different groups never meet
  for (const flag of flags) {
    const last = groups[groups.length - 1];
    if (last && flag.x - (last[last.length - 1]?.x ?? 0) < reach) last.push(flag);
    else groups.push([flag]);
  }
  return groups.flatMap((group) => placeGroup(group, left, right, lanes));
}

/** Leaves out labels until the rest fits. */
function placeGroup(flags: Flag[], left: number, right: number, lanes: number): (Place | null)[] {
  const kept = new Set(flags);
  while (kept.size) {
    const mine = [...kept];
    const found = mine.length > MOST_LABELS ? null : arrange(mine, left, right, lanes);
    if (found) return flags.map((flag) => found[mine.indexOf(flag)] ?? null);
    kept.delete(mine.reduce((worst, flag) => (flag.rank >= worst.rank ? flag : worst)));
  }
  return flags.map(() => null);
}

/** A label stands at the right of its line or at its left. Tried are all choices that change sides twice at most; the fewest lanes win. */
function arrange(flags: Flag[], left: number, right: number, lanes: number): Place[] | null {
  let best: { found: Place[]; height: number } | null = null;
  for (const first of [true, false]) {
    for (let from = flags.length; from >= 0; from -= 1) {
      for (let to = flags.length; to >= Math.max(from, 1); to -= 1) {
        const boxes = flags.map((flag, index) => ((index < from || index >= to) === first ? { left: flag.x + GAP, right: flag.x + GAP + flag.width } : { left: flag.x - GAP - flag.width, right: flag.x - GAP }));
        if (boxes.some((box) => box.left < left || box.right > right)) continue;
        const found = stack(flags, boxes, best?.height ?? lanes);
        if (found) best = { found, height: Math.max(...found.map((one) => one.lane)) };
      }
    }
  }
  return best?.found ?? null;
}

/** Raises labels until nothing meets; null where that takes more lanes than there are. */
function stack(flags: Flag[], boxes: { left: number; right: number }[], lanes: number): Place[] | null {
  if (lanes < 1) return null;
  const lane = flags.map(() => 0);
  const at = (index: number): number => lane[index] ?? 0;
  const under = (line: number, label: number): boolean => {
    const [x, box] = [flags[line]?.x ?? 0, boxes[label]];
    return box !== undefined && x > box.left - GAP && x < box.right + GAP;
  };
  for (let moved = true; moved; ) {
    moved = false;
    for (let i = 0; i < flags.length; i += 1) {
      for (let j = i + 1; j < flags.length; j += 1) {
        const [mine, other] = [boxes[i], boxes[j]];
        if (!mine || !other || mine.left >= other.right + GAP || other.left >= mine.right + GAP) continue;
        // A line rises to its own label: a label above which it stands must be higher than that.
        const [iHigher, jHigher] = [under(j, i), under(i, j)];
        if (iHigher && jHigher) return null;
        if (iHigher ? at(i) > at(j) : jHigher ? at(j) > at(i) : at(i) !== at(j)) continue;
        const raised = jHigher ? j : i;
        lane[raised] = iHigher || jHigher ? at(iHigher ? j : i) + 1 : at(i) + 1;
        if (at(raised) >= lanes) return null;
        moved = true;
      }
    }
  }
  return boxes.map((box, index) => ({ ...box, lane: at(index) }));
}
