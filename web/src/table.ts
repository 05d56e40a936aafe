// Tables that sort by a click on a column header, and lists of facts.
import type { Facts, Table } from "./data";
import { button, element, file_name, save } from "./dom";

type Cell = Table["rows"][number][number];
const kLong = 36;  // characters from which on a text wraps instead of widening the table
const shown = (c: Cell) => (typeof c === "string" ? c : c.text);

// Sorts numbers by value, and text in natural order: taylor2 before taylor10. Missing values come last.
function before(a: Cell, b: Cell, down: boolean): number {
  const sign = down ? -1 : 1;
  if (typeof a === "object" && typeof b === "object") {
    if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
    return sign * (a.value - b.value);
  }
  return sign * shown(a).localeCompare(shown(b), "en", { numeric: true });
}

export function table(section: HTMLElement, tools: HTMLElement, heading: string, data: Table) {
  const body = element("tbody");
  const heads = data.columns.map((c) => element("th", { scope: "col", ...(c.number && { class: "number" }), ...(c.about && { title: c.about }) }));
  const rows = [...data.rows];
  const kind = (c: Cell, i: number) => (data.columns[i].number ? "number" : shown(c).length > kLong ? "long" : "");
  const cell = (c: Cell, i: number) => element("td", kind(c, i) ? { class: kind(c, i) } : {}, shown(c));
  const fill = () => body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map(cell))));
  heads.forEach((head, i) => head.append(button(data.columns[i].name, () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const h of heads) h.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => before(a[i], b[i], down));
    fill();
  })));
  fill();
  section.append(element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": heading }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)));
  tools.append(button("CSV", () => {
    const quote = (s: string) => (/[",\n]/.test(s) ? '"' + s.replaceAll('"', '""') + '"' : s);
    const raw = (c: Cell) => (typeof c === "string" ? c : c.value === null ? "" : String(c.value));
    const text = [data.columns.map((c) => quote(c.name)), ...rows.map((r) => r.map((c) => quote(raw(c))))].map((r) => r.join(",")).join("\n") + "\n";
    save(file_name(heading, ".csv"), "data:text/csv;charset=utf-8," + encodeURIComponent(text));
  }, "save this table as CSV"));
}

export function facts(section: HTMLElement, data: Facts) {
  section.append(element("dl", {}, ...data.facts.flatMap((f) => [element("dt", {}, f.name), element("dd", f.code ? { class: "code" } : {}, f.value)])));
}
