// What a report is: the JSON that src/report/report.cpp writes.
export type Num = number | null; // null: not a number

export interface Series {
  name: string; // series of one name are one legend entry
  group?: string; // entries of a group share a hue and a place in the legend
  strong?: boolean; // what the others are compared with
  dashed?: boolean;
  points: [Num, Num][];
  spread?: Num[]; // plus or minus, at each point
}
export interface Lines {
  kind: "lines";
  x_label: string;
  y_label: string;
  log_x: boolean;
  log_y: boolean;
  smooth: boolean; // offers to smooth noisy lines
  series: Series[];
}
export interface Bar {
  name: string;
  group?: string;
  strong?: boolean;
  values: Num[]; // one for each category
  spread?: Num[];
}
export interface Bars {
  kind: "bars";
  label: string;
  dots: boolean; // points on an axis that need not begin at 0
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
  details?: { y: number; x: number; sections: Section[] }[]; // shown on a click
}
export interface Boxes {
  kind: "boxes";
  x_label: string;
  y_label: string;
  categories: string[];
  series: { name: string; boxes: Num[][] }[]; // least, quarter, half, three quarters, most
  lines: Series[]; // x: the number of the category
}
export interface Facts {
  kind: "facts";
  facts: { name: string; value: string; code?: boolean }[];
}
export type Content = Lines | Bars | Table | HeatMap | Boxes | Facts;
export interface Section {
  heading: string;
  text?: string;
  half?: boolean; // two beside each other where there is room
  content: Content;
}
export interface Report {
  title: string;
  subtitle?: string;
  summary: string[];
  sections: Section[];
  footer?: string;
}
