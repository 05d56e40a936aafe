// A legend of buttons: a click hides or shows an entry or a group, a double click isolates it.
import type { Entry } from "./theme";
import { button, element } from "./dom";

export interface Legend { node: HTMLElement; hidden: Set<string>; paint(colours: Map<string, { colour: string } & Entry>): void }

export function legend(entries: Entry[], changed: () => void, hover: (name: string | null) => void): Legend {
  const hidden = new Set<string>();
  const node = element("div", { class: "legend" });
  const buttons = new Map<string, HTMLButtonElement>();
  const refresh = () => {
    for (const [name, b] of buttons) b.setAttribute("aria-pressed", String(!hidden.has(name)));
    changed();
  };
  const toggle = (names: string[]) => {
    const show = names.every((n) => hidden.has(n));
    for (const n of names) show ? hidden.delete(n) : hidden.add(n);
    refresh();
  };
  const alone = (names: string[]) => {
    hidden.clear();
    for (const e of entries) if (!names.includes(e.name) && !e.strong) hidden.add(e.name);
    refresh();
  };
  const groups = [...new Set(entries.map((e) => e.group))];
  for (const group of groups) {
    const members = entries.filter((e) => e.group === group);
    const names = members.map((e) => e.name);
    const box = element("div", { class: "group" });
    if (group) {
      const of = button(group, () => toggle(names), "click: hide or show the group; double click: show only the group");
      of.className = "of";
      of.addEventListener("dblclick", () => alone(names));
      box.append(of);
    }
    for (const e of members) {
      const b = button("", () => toggle([e.name]), "click: hide or show; double click: show only this");
      b.className = "entry";
      b.setAttribute("aria-pressed", "true");
      b.append(element("span", { class: e.strong ? "chip strong" : "chip" }), e.name);
      b.addEventListener("dblclick", () => alone([e.name]));
      b.addEventListener("pointerenter", () => hover(e.name));
      b.addEventListener("pointerleave", () => hover(null));
      buttons.set(e.name, b);
      box.append(b);
    }
    node.append(box);
  }
  if (entries.length > 3) {
    const all = button("show all", () => (hidden.clear(), refresh()));
    all.className = "of";
    node.append(all);
  }
  const paint: Legend["paint"] = (colours) => {
    for (const [name, b] of buttons) (b.firstElementChild as HTMLElement).style.background = colours.get(name)!.colour;
  };
  return { node, hidden, paint };
}
