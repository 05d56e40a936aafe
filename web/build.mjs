// Inlines the script and the style into page.html. node build.mjs [OUT]
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const { outputFiles } = await build({
  entryPoints: ["src/main.ts"],
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  legalComments: "inline", // keep the licences of bundled code
  charset: "ascii",
  write: false,
});
// Functions, not strings: "$&" in the bundle must stay unchanged.
const page = readFileSync("src/page.html", "utf8")
  .replace("/*style*/", () => readFileSync("src/page.css", "utf8").trim())
  .replace("/*script*/", () => outputFiles[0].text.trim().replaceAll("</script", "<\\/script"));
writeFileSync(process.argv[2] ?? "report.html", page);
