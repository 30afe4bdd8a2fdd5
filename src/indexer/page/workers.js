/* The table of workers, a page at a time, and the reasons for which views are partial. */
import { call } from "./api.js";
import { count, duration, fillRows, find, make, rowOf, show } from "./format.js";

const PAGE = 50; /* workers */
const STATES = { active: "good", replaying: "warn", pending: "warn", paused: "warn", failed: "bad", withdrawn: "warn" };
const state = { offset: 0, total: 0 };

/** A word with a dot in a colour, and lines of detail below it. */
export function fillMark(cell, text, kind, ...details) {
  const wanted = details.filter(Boolean);
  while (cell.children.length > wanted.length + 1) cell.lastChild.remove();
  while (cell.children.length < wanted.length + 1) cell.append(make("span"));
  show(cell.children[0], text, `mark ${kind}`);
  wanted.forEach((detail, i) => show(cell.children[i + 1], detail, "detail"));
}

function leftOut(listener) {
  const parts = Object.entries(listener.skipped ?? {}).map(([reason, n]) => `${count(n)} left out: ${reason}`);
  if (listener.malformed) parts.push(`${count(listener.malformed)} messages were no batches`);
  if (listener.event_block_size) parts.push(`its events have blocks of ${listener.event_block_size} tokens`);
  return parts.join(", ");
}

function fill(row, { worker, rank, listener }) {
  const cells = row.children;
  show(cells[0], String(worker.instance_id));
  show(cells[1], rank);
  show(cells[2], worker.tenant_id === "default" ? worker.model_name : `${worker.model_name} (${worker.tenant_id})`);
  fillMark(cells[3], listener.status, STATES[listener.status] ?? "warn", listener.endpoint,
    listener.connected ? "" : `no connection for ${duration(listener.disconnected_ms)}`, listener.last_error, leftOut(listener));
  fillMark(cells[4], listener.partial ? "partial" : "whole", listener.partial ? "warn" : "good", (listener.partial_reasons ?? []).join(", "));
  show(cells[5], count(listener.blocks));
  show(cells[6], listener.last_event_age_ms === undefined ? "none yet" : duration(listener.last_event_age_ms));
  show(cells[7], listener.lag_ms === undefined ? "–" : duration(listener.lag_ms));
  show(cells[8], `${count(listener.gaps)}, ${count(listener.missed_batches)}`);
}

function ranksOf(workers) {
  return workers.flatMap((worker) => Object.entries(worker.listeners).map(([rank, listener]) => ({ worker, rank, listener })));
}

/** Fetch the current page of workers and show it. */
export async function loadWorkers() {
  const ask = new URLSearchParams({ limit: PAGE, offset: state.offset });
  if (find("search").value.trim()) ask.set("search", find("search").value.trim());
  if (find("only").value) ask.set("only", find("only").value);
  const page = await call(`/workers?${ask}`);
  if (page.offset !== state.offset) return; /* another page was chosen meanwhile */
  state.total = page.total;
  if (state.offset && state.offset >= page.total) {
    state.offset = 0;
    await loadWorkers();
    return;
  }
  fillRows(find("workers-rows"), ranksOf(page.workers), (item) => `${item.worker.instance_id}:${item.rank}`,
    () => rowOf("id", "", "name", "", "", "number", "number", "number", "number"), fill);
  const first = page.total ? page.offset + 1 : 0;
  show(find("range"), `${count(first)} to ${count(page.offset + page.workers.length)} of ${count(page.total)} workers`);
  find("before").disabled = !page.offset;
  find("next").disabled = page.offset + PAGE >= page.total;
}

/** Show the reasons of GET /overview. */
export function showReasons(overview) {
  const reasons = Object.entries(overview.partial_reasons);
  find("reasons").hidden = !reasons.length;
  fillRows(find("reasons-rows"), reasons, ([name]) => name, () => rowOf("id", "number", "", ""), (row, [name, reason]) => {
    [name, count(reason.ranks), reason.set_by, reason.ended_by].forEach((text, i) => show(row.children[i], text));
  });
}

/** Let the controls load another page; @load calls loadWorkers and shows its failure. */
export function watchWorkers(load) {
  const turn = (offset) => {
    state.offset = Math.max(0, offset);
    load();
  };
  find("workers-form").addEventListener("submit", (event) => event.preventDefault());
  find("search").addEventListener("input", () => turn(0));
  find("only").addEventListener("change", () => turn(0));
  find("before").addEventListener("click", () => turn(state.offset - PAGE));
  find("next").addEventListener("click", () => turn(state.offset + PAGE));
}
