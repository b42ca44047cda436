// Numbers as text.

const MINUS = "\u2212";

export function signed(text: string): string {
  return text.startsWith("-") ? MINUS + text.slice(1) : text;
}

/** A sentence of the terminal's with the signs that a page has: a minus, plus and minus, both on one line with their number. */
export function typeset(text: string): string {
  return text.replaceAll(" +- ", "\u00a0\u00b1\u00a0").replaceAll("(+- ", "(\u00b1\u00a0").replaceAll("r' = ", "r\u2032\u00a0=\u00a0").replace(/(^|[ (])-(?=\d)/g, `$1${MINUS}`);
}

/** A score: 81.6, in percent where the metric is one. */
export function score(value: number | null | undefined, percent: boolean): string {
  if (value === null || value === undefined) return "\u2013";
  return signed(percent ? rounded(100 * value, 1) : rounded(value, 4));
}

/** As Python writes it: a half goes to the even digit, where toFixed goes up, and a zero has no sign. */
export function rounded(value: number, digits: number): string {
  const size = Math.abs(value);
  const exact = size.toFixed(60);
  const cut = exact.indexOf(".") + 1 + digits;
  const half = /^50*$/.test(exact.slice(cut)) && Number(exact[cut - 1]) % 2 === 0;
  const text = half ? exact.slice(0, cut) : size.toFixed(digits);
  return value < 0 && Number(text) !== 0 ? `-${text}` : text;
}

/** A score on an axis. */
export function tick(value: number, percent: boolean): string {
  return signed(String(Number((percent ? 100 * value : value).toPrecision(4))));
}

/** A power of ten on an axis. */
export function power(value: number): string {
  const digits = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  const exponent = Math.round(Math.log10(value));
  return `10${String(exponent).replace("-", "\u207b").replace(/\d/g, (digit) => digits[Number(digit)] ?? "")}`;
}

/** A gain: +7.6. */
export function gain(value: number | null | undefined, percent: boolean): string {
  if (value === null || value === undefined) return "\u2013";
  const text = score(value, percent);
  return value > 0 && Number(text) !== 0 ? `+${text}` : text;
}

export function small(value: number | null | undefined): string {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e").replaceAll("-", MINUS);
  return signed(String(Number(value.toPrecision(3))));
}

/** A moment, in seconds since 1970, by the reader's clock: 2026-11-18 14:05. */
export function moment(seconds: number | undefined): string {
  if (!seconds) return "\u2013";
  const at = new Date(1000 * seconds);
  const two = (n: number): string => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

export function count(n: number, word: string): string {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

export function mean(values: number[]): number | null {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

export function deviation(values: number[]): number | null {
  if (values.length < 2) return null;
  const middle = mean(values) as number;
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

export function known(values: (number | null | undefined)[]): number[] {
  return values.filter((value): value is number => value !== null && value !== undefined);
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}
