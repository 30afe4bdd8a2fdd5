/* Numbers and times as text, and elements made of text alone: names come from outside, so nothing is ever parsed as HTML. */

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (n) => whole.format(n);
export const rough = (n) => (Math.abs(n) >= 1000 ? whole.format(n) : short.format(n));
export const latency = (ms) => `${brief.format(ms)} ms`;
export const percent = (part, all) => (all ? `${short.format((100 * part) / all)} %` : "–");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; n >= 1024 && unit < units.length - 1; unit++) n /= 1024;
  return `${rough(n)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms < 0) return `-${duration(-ms)}`;
  if (ms < 1000) return `${rough(ms)} ms`;
  if (ms < 60000) return `${Math.floor(ms / 1000)} s`;
  if (ms < 3600000) return `${Math.floor(ms / 60000)} min`;
  if (ms < 86400000) return `${Math.floor(ms / 3600000)} h ${Math.floor(ms / 60000) % 60} min`;
  return `${Math.floor(ms / 86400000)} d ${Math.floor(ms / 3600000) % 24} h`;
}

const two = (n) => String(n).padStart(2, "0");

export function clock(ms, seconds = true) {
  const d = new Date(ms);
  return `${two(d.getHours())}:${two(d.getMinutes())}${seconds ? `:${two(d.getSeconds())}` : ""}`;
}

export const find = (id) => document.getElementById(id);

/** Make an element with a class and children: elements, or text. */
export function make(tag, kind, ...children) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...children);
  return element;
}

/** Set the text and class of an element, if they differ: readers hear no change then. */
export function show(element, text, kind) {
  if (element.textContent !== text) element.textContent = text;
  if (kind !== undefined && element.className !== kind) element.className = kind;
}

/**
 * Make the rows of @body those of @items, one each, and keep the elements of rows that stay: focus and reading
 * place stay, too. @key names an item, @create makes its row, @fill writes it.
 */
export function fillRows(body, items, key, create, fill) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = items.map((item) => {
    const row = old.get(key(item)) ?? create(item);
    row.dataset.key = key(item);
    fill(row, item);
    return row;
  });
  if (rows.length !== body.children.length || rows.some((row, i) => row !== body.children[i])) body.replaceChildren(...rows);
}

/** Make a row whose first cell heads it, with cells of these classes. */
export function rowOf(...kinds) {
  const row = document.createElement("tr");
  kinds.forEach((kind, i) => {
    const cell = make(i ? "td" : "th", kind);
    if (!i) cell.scope = "row";
    row.append(cell);
  });
  return row;
}
