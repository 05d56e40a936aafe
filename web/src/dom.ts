// DOM elements with text content: nothing from a report is ever parsed as markup.
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Record<string, string> = {}, ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

export function button(text: string, act: () => void, title = ""): HTMLButtonElement {
  const b = element("button", { type: "button", ...(title && { title }) }, text);
  b.addEventListener("click", act);
  return b;
}

export function save(name: string, url: string) {
  const a = element("a", { href: url, download: name });
  document.body.append(a);
  a.click();
  a.remove();
}

export const file_name = (heading: string, end: string) =>
  (heading.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart") + end;

// Three or four significant digits.
export function text_of(x: number | null | undefined): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(2).replace(/\.?0+e/, "e");
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return size >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(4));
}
