// Bundles src/ and the chart library into one file, built.html, that needs no other. `make page` runs this.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "built.html");
const result = await build({
  entryPoints: { page: join(here, "src/main.ts"), style: join(here, "src/page.css") },
  absWorkingDir: here,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  legalComments: "none", // the licence stands whole below
  outdir: join(here, "nowhere"),
  write: false,
});
const text = (ending) => result.outputFiles.find((file) => file.path.endsWith(ending)).text.trim();
const hash = (content) => `'sha256-${createHash("sha256").update(content).digest("base64")}'`;

const script = text("page.js");
const style = text("style.css");
const licence = readFileSync(join(here, "node_modules/uplot/LICENSE"), "utf8").trim();
// Nothing may be asked from anywhere but where the page came from, and no other script may run.
const policy = [
  "default-src 'none'",
  `script-src ${hash(script)}`,
  `style-src ${hash(style)}`,
  "connect-src 'self'",
  "img-src data:", // the empty icon: no browser asks for another
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");
// What it was built from: a test tells from this, without npm, that someone forgot to build it anew.
const origin = createHash("sha256");
for (const name of [...readdirSync(join(here, "src")).sort().map((file) => `src/${file}`), "build.mjs", "package.json", "package-lock.json"]) {
  origin.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
}
const parts = { ORIGIN: origin.digest("hex"), POLICY: policy, STYLE: style, SCRIPT: script, LICENCE: licence };
const page = readFileSync(join(here, "src/page.html"), "utf8").replace(/@(ORIGIN|POLICY|STYLE|SCRIPT|LICENCE)@/g, (_, name) => parts[name]);
writeFileSync(out, page);
console.log(`${out}: ${Math.round(page.length / 1024)} KB`);
