// The report page: title, summary and sections.
import { bars, boxes, heat_map } from "./charts";
import type { Report, Section } from "./data";
import { element } from "./dom";
import { lines } from "./lines";
import { facts, table } from "./table";

const page = document.getElementById("page")!;
const report: Report = JSON.parse(document.getElementById("report")!.textContent!);

function show(at: HTMLElement, s: Section, id?: string) {
  const section = element("section", { ...(id && { id }), ...(s.half && { class: "half" }) });
  const tools = element("div", { class: "tools" });
  section.append(element("div", { class: "head" }, element("h2", {}, s.heading), tools));
  if (s.text) section.append(element("p", { class: "text" }, s.text));
  at.append(section);
  const c = s.content;
  switch (c.kind) {
    case "lines": return lines(section, tools, s.heading, c);
    case "bars": return bars(section, tools, s.heading, c);
    case "heat_map": return heat_map(section, tools, s.heading, c, show);
    case "boxes": return boxes(section, tools, s.heading, c);
    case "table": return table(section, tools, s.heading, c);
    case "facts": return facts(section, c);
  }
}

document.title = report.title;
page.append(element("header", {}, element("h1", {}, report.title), element("p", { class: "subtitle" }, report.subtitle ?? "")));
if (report.summary.length)
  page.append(element("div", { class: "summary" }, element("h2", {}, "What the numbers say"), element("ul", {}, ...report.summary.map((s) => element("li", {}, s)))));
if (report.sections.length > 2)
  page.append(element("nav", {}, ...report.sections.map((s, i) => element("a", { href: `#s${i}` }, s.heading))));
const sections = element("div", { class: "sections" });
page.append(sections);
report.sections.forEach((s, i) => show(sections, s, `s${i}`));
if (report.footer) page.append(element("footer", {}, report.footer));
