// The JSON of a report, as src/report/report.cpp writes it.
export type Num = number | null; // null: not finite

export interface Series {
  name: string; // series with the same name share a legend entry
  group?: string; // entries of a group share a hue and are adjacent in the legend
  strong?: boolean; // the reference of a comparison
  dashed?: boolean;
  points: [Num, Num][];
  spread?: Num[]; // plus or minus, per point
}
export interface Lines {
  kind: "lines";
  x_label: string;
  y_label: string;
  log_x: boolean;
  log_y: boolean;
  smooth: boolean; // noisy: offers smoothing
  series: Series[];
}
export interface Bar {
  name: string;
  group?: string;
  strong?: boolean;
  values: Num[]; // per category
  spread?: Num[];
}
export interface Bars {
  kind: "bars";
  label: string;
  dots: boolean; // points on an axis that need not start at 0
  categories: string[];
  series: Bar[];
}
export interface Table {
  kind: "table";
  columns: { name: string; number: boolean; about?: string }[];
  rows: (string | { value: Num; text: string })[][];
}
export interface HeatMap {
  kind: "heat_map";
  label: string;
  x_label: string;
  y_label: string;
  x: string[];
  y: string[];
  values: Num[][]; // [y][x]
  details?: { y: number; x: number; sections: Section[] }[]; // shown on click
}
export interface Boxes {
  kind: "boxes";
  x_label: string;
  y_label: string;
  categories: string[];
  series: { name: string; boxes: Num[][] }[]; // minimum, quartiles, maximum
  lines: Series[]; // x: the index of the category
}
export interface Facts {
  kind: "facts";
  facts: { name: string; value: string; code?: boolean }[];
}
export type Content = Lines | Bars | Table | HeatMap | Boxes | Facts;
export interface Section {
  heading: string;
  text?: string;
  half?: boolean; // half width if there is room
  content: Content;
}
export interface Report {
  title: string;
  subtitle?: string;
  summary: string[];
  sections: Section[];
  footer?: string;
}
