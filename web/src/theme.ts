// Colours of the page, from CSS, and of the series. A group has one hue, from light to dark.
export interface Theme { dark: boolean; ink: string; soft: string; line: string; card: string; accent: string }

export const dark_mode = matchMedia("(prefers-color-scheme: dark)");

export function theme(): Theme {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string) => style.getPropertyValue(name).trim();
  return { dark: dark_mode.matches, ink: of("--ink"), soft: of("--soft"), line: of("--line"), card: of("--card"), accent: of("--accent") };
}

// Colours of the first and last entry of a group, on white and on black.
const RAMPS: [light: [string, string], dark: [string, string]][] = [
  [["#82bdf5", "#0d3f94"], ["#24579f", "#b9dcff"]], // blue
  [["#f4ad5e", "#a33b00"], ["#a5520f", "#ffcf94"]], // orange
  [["#74cf9a", "#0a5b34"], ["#1d7a4b", "#a5efc4"]], // green
  [["#cf9df0", "#5a1b9a"], ["#7a3cb8", "#e6c8ff"]], // purple
  [["#f29a9f", "#99152b"], ["#a93445", "#ffc2c6"]], // red
  [["#6fd0d4", "#07565f"], ["#137b84", "#a4f0f2"]], // teal
  [["#d8bf6a", "#66500a"], ["#87701a", "#f3e3a2"]], // ochre
  [["#f09ccf", "#93185f"], ["#a23a78", "#ffc6e6"]], // pink
];
// Distinct hues for entries without a group.
const HUES: [light: string, dark: string][] = [
  ["#1c5fd4", "#7fb0ff"], ["#d9690c", "#ffab5e"], ["#118a52", "#5fd69b"], ["#8a3fd1", "#cda2ff"], ["#c92a44", "#ff8f9c"],
  ["#0d8b96", "#5cd5de"], ["#97780b", "#e3c95c"], ["#c23b8b", "#ff9bd4"], ["#6b7280", "#aab3be"], ["#5a4ae0", "#a59bff"],
];

function mixed(a: string, b: string, share: number): string {
  const part = (hex: string, i: number) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
  return "#" + [0, 1, 2].map((i) => Math.round(part(a, i) + (part(b, i) - part(a, i)) * share).toString(16).padStart(2, "0")).join("");
}

export interface Entry { name: string; group: string; strong: boolean }

// Each distinct name in order, with its colour.
export function colours(series: { name: string; group?: string; strong?: boolean }[], t: Theme): Map<string, { colour: string } & Entry> {
  const entries = new Map<string, Entry>();
  for (const s of series) if (!entries.has(s.name)) entries.set(s.name, { name: s.name, group: s.group ?? "", strong: !!s.strong });
  const plain = [...entries.values()].filter((e) => !e.strong);
  const groups = [...new Set(plain.map((e) => e.group).filter((g) => g))];
  const out = new Map<string, { colour: string } & Entry>();
  let loose = 0;
  for (const e of entries.values()) {
    let colour = t.ink;
    if (!e.strong && !e.group) colour = HUES[(groups.length + loose++) % HUES.length][t.dark ? 1 : 0];
    else if (!e.strong) {
      const mates = plain.filter((p) => p.group === e.group);
      const [from, to] = RAMPS[groups.indexOf(e.group) % RAMPS.length][t.dark ? 1 : 0];
      colour = mixed(from, to, mates.length === 1 ? 0.55 : mates.indexOf(e) / (mates.length - 1));
    }
    out.set(e.name, { ...e, colour });
  }
  return out;
}
