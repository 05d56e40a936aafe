// The parts of every chart: a canvas that follows the page's width and colours, a legend, and buttons.
import { BarChart, BoxplotChart, CustomChart, HeatmapChart, LineChart, ScatterChart } from "echarts/charts";
import { AriaComponent, GridComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { type ECharts, init, use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";
import type { Num } from "./data";
import { button, element, file_name, save, text_of } from "./dom";
import { type Legend, legend } from "./legend";
import { type Entry, type Theme, colours, dark_mode, theme } from "./theme";

use([BarChart, BoxplotChart, CustomChart, HeatmapChart, LineChart, ScatterChart, AriaComponent, GridComponent, TooltipComponent, VisualMapComponent, CanvasRenderer]);

export type Colours = Map<string, { colour: string } & Entry>;
export interface View { theme: Theme; colours: Colours; hidden: Set<string>; width: number }
export interface Frame { chart: ECharts; box: HTMLElement; legend: Legend | null; redraw(): void; tool(text: string, on: boolean, act: (on: boolean) => void): void }

const drawn: (() => void)[] = [];
dark_mode.addEventListener("change", () => drawn.forEach((draw) => draw()));

export function frame(
  section: HTMLElement, tools: HTMLElement, heading: string, named: { name: string; group?: string; strong?: boolean }[],
  height: (width: number) => number, option: (view: View) => object,
): Frame {
  const box = element("div", { class: "chart", role: "img", "aria-label": heading });
  section.append(box);
  box.style.height = height(box.clientWidth) + "px";
  const chart = init(box);
  const keys = [...colours(named, theme()).values()];
  let shown: Legend | null = null;
  const redraw = () => {
    const t = theme();
    const c = colours(named, t);
    shown?.paint(c);
    const width = box.clientWidth;
    chart.setOption({ animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily }, ...option({ theme: t, colours: c, hidden: shown?.hidden ?? new Set(), width }) }, { notMerge: true });
  };
  if (keys.length > 1) {
    const hover = (name: string | null) => chart.dispatchAction(name === null ? { type: "downplay" } : { type: "highlight", seriesName: name });
    shown = legend(keys, redraw, hover);
    section.append(shown.node);
  }
  new ResizeObserver(() => {
    box.style.height = height(box.clientWidth) + "px";
    chart.resize();
    redraw();
  }).observe(box);
  drawn.push(redraw);
  tools.append(button("PNG", () => save(file_name(heading, ".png"), chart.getDataURL({ pixelRatio: 2, backgroundColor: theme().card })), "save this chart as PNG"));
  const tool: Frame["tool"] = (text, on, act) => {
    const b = button(text, () => {
      on = !on;
      b.setAttribute("aria-pressed", String(on));
      act(on);
    });
    b.setAttribute("aria-pressed", String(on));
    tools.prepend(b);
  };
  return { chart, box, legend: shown, redraw, tool };
}

export const tip_style = (t: Theme) => ({
  backgroundColor: t.card, borderColor: t.line, textStyle: { color: t.ink, fontSize: 12 }, confine: true, appendTo: "body" as const,
  extraCssText: "box-shadow: 0 4px 18px rgba(0,0,0,.18); border-radius: 8px;",
});

// DOM nodes, so that names are never parsed as markup.
export function tip(title: string, rows: { colour: string; name: string; value: string }[], most = 14): HTMLElement {
  const node = element("div", { class: "tip" }, element("strong", {}, title));
  for (const r of rows.slice(0, most)) {
    const chip = element("span", { class: "chip" });
    chip.style.background = r.colour;
    node.append(element("div", { class: "row" }, element("span", {}, chip, r.name), element("span", { class: "value" }, r.value)));
  }
  if (rows.length > most) node.append(element("div", {}, `and ${rows.length - most} more`));
  return node;
}

// Whiskers: [x, low, high], or [low, high, y] if horizontal.
export const whiskers = (name: string, data: Num[][], colour: string, horizontal: boolean) => ({
  type: "custom" as const, name, data, clip: true, silent: true, tooltip: { show: false }, z: 3,
  renderItem: (_: unknown, api: any) => {
    const [a, b] = horizontal ? [[api.value(0), api.value(2)], [api.value(1), api.value(2)]] : [[api.value(0), api.value(1)], [api.value(0), api.value(2)]];
    const [p, q] = [api.coord(a), api.coord(b)];
    const [dx, dy] = horizontal ? [0, 4] : [4, 0];
    const line = (x1: number, y1: number, x2: number, y2: number) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: colour, lineWidth: 1.5 } });
    return { type: "group", children: [line(p[0], p[1], q[0], q[1]), line(p[0] - dx, p[1] - dy, p[0] + dx, p[1] + dy), line(q[0] - dx, q[1] - dy, q[0] + dx, q[1] + dy)] };
  },
});

export const with_spread = (value: number | null, spread?: number | null) => text_of(value) + (spread ? " ± " + text_of(+spread.toPrecision(2)) : "");
