// A linear or logarithmic axis with round ticks. Charts draw position(value) on a linear ECharts axis.
import type { Num } from "./data";
import { text_of } from "./dom";
import type { Theme } from "./theme";

export type Range = [number, number];

export const position = (x: Num, log: boolean): Num => (x === null ? null : !log ? x : x > 0 ? Math.log10(x) : null);
export const value_at = (p: number, log: boolean): number => (log ? 10 ** p : p);

export function range_of(values: Iterable<Num>, log: boolean, pad = 0.04): Range {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    const p = position(v, log);
    if (p === null || !Number.isFinite(p)) continue;
    low = Math.min(low, p), high = Math.max(high, p);
  }
  if (low > high) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * pad;
  return [low - room, high + room];
}

function round_steps(low: number, high: number, most: number): number[] {
  const rough = (high - low) / most;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= rough * 0.999)!;
  const out: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) out.push(+(i * step).toPrecision(12));
  return out;
}

// Positions of round values.
export function ticks([low, high]: Range, log: boolean, most = 7): number[] {
  if (!log) return round_steps(low, high, most);
  const decades = high - low;
  if (decades < 0.8) return round_steps(10 ** low, 10 ** high, most).filter((v) => v > 0).map(Math.log10);
  const parts = decades > 3 ? [1] : decades > 1.7 ? [1, 3] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7];
  const every = Math.max(1, Math.ceil(decades / (most + 1)));
  const out: number[] = [];
  for (let e = Math.floor(low); e <= high; ++e)
    for (const p of parts) {
      const at = e + Math.log10(p);
      if (at >= low && at <= high && (parts.length > 1 || e % every === 0)) out.push(at);
    }
  return out;
}

export function axis_option(range: Range, log: boolean, t: Theme, most: number) {
  const at = ticks(range, log, most);
  return {
    type: "value" as const,
    min: range[0],
    max: range[1],
    axisTick: { show: false, customValues: at },
    axisLabel: { color: t.soft, fontSize: 11, customValues: at, hideOverlap: true, formatter: (p: number) => text_of(+value_at(p, log).toPrecision(6)) },
    splitLine: { lineStyle: { color: t.line } },
    axisLine: { show: false },
    axisPointer: { lineStyle: { color: t.soft, type: "dashed" as const }, label: { show: false } },
  };
}
