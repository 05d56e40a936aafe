// Line charts: drag to zoom, double click to reset; axes switch between linear and logarithmic.
import { type Range, axis_option, position, range_of, value_at } from "./axis";
import type { Lines, Num, Series } from "./data";
import { element, text_of } from "./dom";
import { type View, frame, tip, tip_style, whiskers, with_spread } from "./frame";

// A centred moving average over a fiftieth of the points; the window shrinks symmetrically at the ends.
function smoothed(points: [Num, Num][]): [Num, Num][] {
  const most = Math.round(points.length / 100);
  return points.map(([x, y], i) => {
    const reach = Math.min(most, i, points.length - 1 - i);
    const near = points.slice(i - reach, i + reach + 1).flatMap((p) => (p[1] === null ? [] : [p[1]]));
    return [x, y === null ? null : near.reduce((a, b) => a + b, 0) / near.length];
  });
}

export function lines(section: HTMLElement, tools: HTMLElement, heading: string, data: Lines) {
  let log_x = data.log_x, log_y = data.log_y, smooth = data.smooth;
  let zoom: { x: Range; y: Range } | null = null;
  const points = (s: Series) => (smooth ? smoothed(s.points) : s.points);
  const option = (view: View) => {
    const t = view.theme;
    const seen = data.series.filter((s) => !view.hidden.has(s.name));
    const drawn = new Map(seen.map((s) => [s, points(s)]));
    const xs = seen.flatMap((s) => drawn.get(s)!.map((p) => p[0]));
    const ys = seen.flatMap((s) => drawn.get(s)!.flatMap(([, y], i) => {
      const by = s.spread?.[i];
      return y !== null && by ? [y - by, y + by] : [y];
    }));
    const range = zoom ?? { x: range_of(xs, log_x, 0.02), y: range_of(ys, log_y) };
    const narrow = view.width < 560;
    const series = seen.flatMap((s) => {
      const { colour } = view.colours.get(s.name)!;
      const few = s.points.length <= 40;
      const line = {
        type: "line", name: s.name, data: drawn.get(s)!.map(([x, y]) => [position(x, log_x), position(y, log_y)]),
        showSymbol: few && !(s.strong && s.dashed), symbol: "circle", symbolSize: 7, color: colour, z: s.strong ? 4 : 2,
        lineStyle: { width: s.strong ? 2.6 : few ? 2 : 1.5, type: s.dashed ? "dashed" : "solid" },
        emphasis: { focus: "series", lineStyle: { width: 3.2 } }, blur: { lineStyle: { opacity: 0.12 }, itemStyle: { opacity: 0.12 } }, clip: true,
      };
      const bars = (s.spread ?? []).flatMap((by, i) => {
        const [x, y] = s.points[i];
        const at = [position(x, log_x), position(by && y !== null ? y - by : null, log_y), position(by && y !== null ? y + by : null, log_y)];
        return at.every((v) => v !== null) ? [at as number[]] : [];
      });
      return bars.length ? [line, whiskers(s.name, bars, colour, false)] : [line];
    });
    return {
      grid: { left: 8, right: 18, top: 26, bottom: 26, containLabel: true },
      xAxis: { ...axis_option(range.x, log_x, t, narrow ? 5 : 9), name: data.x_label, nameLocation: "middle", nameGap: 28, nameTextStyle: { color: t.soft } },
      yAxis: { ...axis_option(range.y, log_y, t, 7), name: data.y_label, nameTextStyle: { color: t.soft, align: "left", padding: [0, 0, 0, -24] }, nameGap: 12 },
      tooltip: { ...tip_style(t), trigger: "axis", formatter: (at: any) => hover(at, view) },
      series,
    };
  };
  // Runs with the same name share a row, which shows their mean.
  const hover = (at: any[], view: View) => {
    const rows = new Map<string, { sum: number; n: number; spread: Num }>();
    for (const p of at) {
      if (p.seriesType !== "line" || p.value[1] === null || p.value[1] === undefined) continue;
      const r = rows.get(p.seriesName) ?? { sum: 0, n: 0, spread: null };
      r.sum += value_at(p.value[1], log_y), ++r.n;
      r.spread = data.series.find((s) => s.name === p.seriesName)?.spread?.[p.dataIndex] ?? null;
      rows.set(p.seriesName, r);
    }
    const sorted = [...rows].map(([name, r]) => ({ name, value: r.sum / r.n, spread: r.spread })).sort((a, b) => b.value - a.value);
    return tip(`${data.x_label} ${text_of(value_at(at[0].axisValue, log_x))}`,
      sorted.map((r) => ({ name: r.name, colour: view.colours.get(r.name)!.colour, value: with_spread(r.value, r.spread) })));
  };
  const f = frame(section, tools, heading, data.series, (w) => (w < 560 ? 300 : 400), option);
  const values = (i: 0 | 1) => data.series.flatMap((s) => s.points.map((p) => p[i])).filter((v): v is number => v !== null);
  const logable = (v: number[]) => v.length > 0 && v.every((x) => x > 0) && Math.max(...v) > 1.5 * Math.min(...v);
  const switched = (act: (on: boolean) => void) => (on: boolean) => (act(on), (zoom = null), f.redraw());
  if (data.log_x || logable(values(0))) f.tool("log x", log_x, switched((on) => (log_x = on)));
  if (data.log_y || logable(values(1))) f.tool("log y", log_y, switched((on) => (log_y = on)));
  if (data.smooth) f.tool("smooth", smooth, switched((on) => (smooth = on)));
  drag_to_zoom(f.box, (from, to) => {
    const a = f.chart.convertFromPixel("grid", from), b = f.chart.convertFromPixel("grid", to);
    zoom = { x: [Math.min(a[0], b[0]), Math.max(a[0], b[0])], y: [Math.min(a[1], b[1]), Math.max(a[1], b[1])] };
    f.redraw();
  }, () => ((zoom = null), f.redraw()));
}

function drag_to_zoom(box: HTMLElement, zoom: (from: number[], to: number[]) => void, back: () => void) {
  box.title = "drag: zoom in; double click: all of it";
  const frame = element("div");
  frame.style.cssText = "position:absolute;pointer-events:none;border:1px dashed var(--accent);background:color-mix(in srgb, var(--accent) 12%, transparent);display:none";
  let from: number[] | null = null;
  const here = (e: PointerEvent) => {
    const r = box.getBoundingClientRect();
    return [e.clientX - r.left, e.clientY - r.top];
  };
  box.addEventListener("pointerdown", (e) => {
    if (e.button !== 0 || e.pointerType === "touch") return;
    from = here(e);
    box.append(frame);
  });
  addEventListener("pointermove", (e) => {
    if (!from) return;
    const to = here(e);
    Object.assign(frame.style, {
      display: "block", left: Math.min(from[0], to[0]) + "px", top: Math.min(from[1], to[1]) + "px",
      width: Math.abs(to[0] - from[0]) + "px", height: Math.abs(to[1] - from[1]) + "px",
    });
  });
  addEventListener("pointerup", (e) => {
    if (!from) return;
    const to = here(e), begun = from;
    from = null;
    frame.style.display = "none";
    if (Math.abs(to[0] - begun[0]) > 8 && Math.abs(to[1] - begun[1]) > 8) zoom(begun, to);
  });
  box.addEventListener("dblclick", back);
}
