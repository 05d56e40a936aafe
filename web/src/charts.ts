// Bars and dots, heat maps, boxes.
import { axis_option, position, range_of } from "./axis";
import type { Bars, Boxes, HeatMap, Num, Section } from "./data";
import { text_of } from "./dom";
import { type View, frame, tip, tip_style, whiskers, with_spread } from "./frame";

export function bars(section: HTMLElement, tools: HTMLElement, heading: string, data: Bars) {
  // Every category has one bar, so bars need no room next to each other.
  const alone = data.categories.every((_, i) => data.series.filter((s) => s.values[i] !== null).length <= 1);
  const ends = (s: Bars["series"][number]) => s.values.flatMap((v, i) => (v === null ? [] : [v - (s.spread?.[i] ?? 0), v + (s.spread?.[i] ?? 0)]));
  const option = (view: View) => {
    const t = view.theme;
    const seen = data.series.filter((s) => !view.hidden.has(s.name));
    const all = seen.flatMap(ends);
    const log = data.dots && Math.min(...all) > 0 && Math.max(...all) > 3 * Math.min(...all); // an outlier must not squeeze the rest
    const range = range_of([...all, ...(data.dots ? [] : [0])], log, 0.05);
    if (!data.dots && range[0] < 0 && all.every((v) => v >= 0)) range[0] = 0;
    const series = seen.flatMap((s) => {
      const { colour } = view.colours.get(s.name)!;
      const at = s.values.map((v, i) => [position(v, log), i]);
      const shape = data.dots
        ? { type: "scatter", symbolSize: 10, data: at, z: 4 }
        : { type: "bar", barMaxWidth: 16, barGap: alone ? "-100%" : "15%", data: at, itemStyle: { borderRadius: [0, 3, 3, 0] } };
      const reach = s.values.flatMap((v, i) => (v !== null && s.spread?.[i] ? [[position(v - s.spread[i]!, log), position(v + s.spread[i]!, log), i]] : []));
      const body = { ...shape, name: s.name, color: colour };
      return reach.length && (data.dots || alone) ? [body, whiskers(s.name, reach, data.dots ? colour : t.ink, true)] : [body];
    });
    return {
      grid: { left: 8, right: 22, top: 8, bottom: 30, containLabel: true },
      yAxis: {
        type: "category", data: data.categories, inverse: true, axisTick: { show: false }, axisLine: { lineStyle: { color: t.line } },
        axisLabel: { color: t.ink, fontSize: 12, width: Math.max(90, view.width * 0.34), overflow: "truncate", interval: 0 },
        splitLine: { show: data.dots, lineStyle: { color: t.line, type: "dotted" } },
      },
      xAxis: { ...axis_option(range, log, t, view.width < 560 ? 4 : 8), name: data.label, nameLocation: "middle", nameGap: 28, nameTextStyle: { color: t.soft } },
      tooltip: { ...tip_style(t), trigger: "axis", axisPointer: { type: "shadow", axis: "y" }, formatter: (at: any) => hover(at, view) },
      series,
    };
  };
  const hover = (at: any[], view: View) => {
    const i: number = at[0].dataIndex;
    return tip(data.categories[i], data.series.filter((s) => !view.hidden.has(s.name) && s.values[i] !== null)
      .map((s) => ({ name: s.name, colour: view.colours.get(s.name)!.colour, value: with_spread(s.values[i], s.spread?.[i]) })));
  };
  const each = data.dots || alone ? 24 : Math.max(24, 15 * data.series.length + 8);
  frame(section, tools, heading, data.series, () => 60 + each * data.categories.length, option);
}

// Light to dark on white, dark to light on black, in even steps of brightness.
const SHADES = ["#f2f0fb", "#c9d3f2", "#93b7e6", "#5796d0", "#2f70b4", "#1f4c8f", "#1b2a5e"];

export function heat_map(section: HTMLElement, tools: HTMLElement, heading: string, data: HeatMap, show: (at: HTMLElement, s: Section) => void) {
  const cells = data.values.flatMap((row, y) => row.map((v, x) => [x, y, v ?? "-"]));
  const finite = data.values.flat().filter((v): v is number => v !== null && Number.isFinite(v));
  const option = (view: View) => {
    const t = view.theme;
    const small = (view.width - 110) / data.x.length < 30;
    const axis = { axisLine: { show: false }, axisTick: { show: false }, axisLabel: { color: t.soft, fontSize: 11 }, nameTextStyle: { color: t.soft }, splitArea: { show: false } };
    return {
      grid: { left: 8, right: 18, top: 26, bottom: 74, containLabel: true },
      xAxis: { ...axis, type: "category", data: data.x, name: data.x_label, nameLocation: "middle", nameGap: 26 },
      yAxis: { ...axis, type: "category", data: data.y, inverse: true, name: data.y_label, nameLocation: "start", nameTextStyle: { color: t.soft, align: "left", padding: [0, 0, 0, -20] }, nameGap: 10 },
      visualMap: {
        type: "continuous", min: Math.min(...finite), max: Math.max(...finite), orient: "horizontal", left: "center", bottom: 0, itemHeight: Math.min(220, view.width * 0.5), itemWidth: 12,
        inRange: { color: t.dark ? [...SHADES].reverse() : SHADES }, textStyle: { color: t.soft, fontSize: 11 },
        text: [text_of(Math.max(...finite)), text_of(Math.min(...finite)) + "  " + data.label], hoverLink: true,
      },
      tooltip: { ...tip_style(t), formatter: (p: any) => tip(`${data.y[p.value[1]]}, ${data.x[p.value[0]]}`, [{ name: data.label, colour: p.color, value: text_of(p.value[2]) }]) },
      series: [{
        type: "heatmap", data: cells, itemStyle: { borderColor: t.card, borderWidth: 1.5, borderRadius: 3 },
        label: { show: !small && data.x.length * data.y.length <= 400, fontSize: 10, formatter: (p: any) => (p.value[2] === "-" ? "" : text_of(+Number(p.value[2]).toPrecision(2))) },
        emphasis: { itemStyle: { borderColor: t.accent } },
      }],
    };
  };
  const f = frame(section, tools, heading, [], () => 110 + Math.max(26, Math.min(34, 560 / data.y.length)) * data.y.length, option);
  if (!data.details?.length) return;
  const below = document.createElement("div");
  section.append(below);
  f.chart.on("click", (p: any) => {
    const found = data.details!.find((d) => d.x === p.value[0] && d.y === p.value[1]);
    below.replaceChildren();
    for (const s of found?.sections ?? []) show(below, s);
  });
}

export function boxes(section: HTMLElement, tools: HTMLElement, heading: string, data: Boxes) {
  const option = (view: View) => {
    const t = view.theme;
    const seen = data.series.filter((s) => !view.hidden.has(s.name));
    const over = data.lines.filter((s) => !view.hidden.has(s.name));
    const values: Num[] = [...seen.flatMap((s) => s.boxes.flat()), ...over.flatMap((s) => s.points.map((p) => p[1]))];
    const colour = (name: string) => view.colours.get(name)!.colour;
    return {
      grid: { left: 8, right: 18, top: 26, bottom: 28, containLabel: true },
      xAxis: { type: "category", data: data.categories, name: data.x_label, nameLocation: "middle", nameGap: 28, nameTextStyle: { color: t.soft }, axisLabel: { color: t.soft }, axisTick: { show: false }, axisLine: { lineStyle: { color: t.line } } },
      yAxis: { ...axis_option(range_of(values, false), false, t, 7), name: data.y_label, nameTextStyle: { color: t.soft, align: "left", padding: [0, 0, 0, -24] }, nameGap: 12 },
      tooltip: {
        ...tip_style(t), formatter: (p: any) => {
          if (p.seriesType !== "boxplot") return tip(data.categories[p.value[0]], [{ name: p.seriesName, colour: p.color, value: text_of(p.value[1]) }]);
          const parts = ["minimum", "lower quartile", "median", "upper quartile", "maximum"];
          return tip(`${p.seriesName}, ${data.categories[p.dataIndex]}`, parts.map((name, i) => ({ name, colour: colour(p.seriesName), value: text_of(p.value[i + 1]) })).reverse());
        },
      },
      series: [
        ...seen.map((s) => ({ type: "boxplot", name: s.name, data: s.boxes, boxWidth: [8, 30], itemStyle: { color: colour(s.name) + "33", borderColor: colour(s.name), borderWidth: 1.5 } })),
        ...over.map((s) => ({ type: "line", name: s.name, color: colour(s.name), z: 5, symbolSize: 6, lineStyle: { type: s.dashed ? "dashed" : "solid", width: 2 }, data: s.points.map(([x, y]) => [x, position(y, false)]) })),
      ],
    };
  };
  frame(section, tools, heading, [...data.series, ...data.lines], (w) => (w < 560 ? 300 : 380), option);
}
