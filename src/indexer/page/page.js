/* The page: what is fetched when, and what is said when kv-indexer doesn't answer. */
import { call, token } from "./api.js";
import { forgetHistory, loadHistory, showHistory, watchCharts } from "./charts.js";
import { showModels, watchExplain } from "./explain.js";
import { bytes, clock, count, duration, fillRows, find, latency, make, percent, rough, rowOf, show } from "./format.js";
import { loadWorkers, showReasons, watchWorkers } from "./workers.js";

const EVERY_MS = 5000, MOST_MS = 30000, AGAIN_MS = 1000;
const state = { timer: 0, every: EVERY_MS, started: 0, lastAnswer: 0, busy: false, again: false, paused: false, silent: false };

/* -- figures ----------------------------------------------------------------------------------- */

/* Title, figure, note, of the overview and the last sample (undefined: none yet). */
const TILES = [
  ["Workers", (o) => count(o.workers), (o) => `${count(o.streams.active)} of ${count(o.ranks)} streams active`],
  ["Partial views", (o) => count(o.partial_ranks), (o) => (o.partial_ranks ? `of ${count(o.ranks)} ranks` : "all answers are exact")],
  ["Prefix tree", (o) => count(sum(o, "blocks")), (o) => `blocks, in ${count(sum(o, "chains"))} chains`],
  ["Held by workers", (o) => count(sum(o, "holder_blocks")), () => "blocks, all copies"],
  ["Memory", (o) => bytes(o.resident_bytes), (o) => `${bytes(sum(o, "bytes"))} of it the index`],
  ["Queries", (o, s) => (s ? `${rough((1000 * s.queries) / s.span_ms)}/s` : "–"), (o) => `${count(o.since_start.queries)} since the start`],
  ["Query latency", (o) => (o.since_start.p50_ms === null ? "–" : latency(o.since_start.p50_ms)),
    (o) => (o.since_start.p99_ms === null ? "no query yet" : `median; 99 % in ${latency(o.since_start.p99_ms)}`)],
  ["Found", (o) => percent(o.since_start.matched_blocks, o.since_start.query_blocks), () => "of the blocks asked for"],
];

const sum = (overview, member) => overview.models.reduce((total, model) => total + Number(model[member]), 0);

function showTiles(overview, sample) {
  fillRows(find("tiles"), TILES, ([title]) => title,
    ([title]) => make("div", "", make("dt", "", title), make("dd", "figure"), make("dd", "note")),
    (tile, [, figure, note]) => {
      show(tile.children[1], figure(overview, sample));
      show(tile.children[2], note(overview, sample));
    });
}

function showModelRows(models) {
  fillRows(find("models-rows"), models, (m) => `${m.model_name}\n${m.tenant_id}`, () => rowOf("name", "name", ...Array(10).fill("number")), (row, m) => {
    const tiers = m.tier_blocks;
    const cells = [m.model_name, m.tenant_id, ...[m.block_size, m.blocks, m.chains, m.holder_blocks, tiers.device, tiers.host_pinned, tiers.disk,
      tiers.external, m.parked].map(count), bytes(m.bytes)];
    cells.forEach((text, i) => show(row.children[i], text));
  });
}

/* -- state of the connection ------------------------------------------------------------------- */

function notice(text) {
  show(find("notice"), text);
  find("notice").hidden = !text;
}

function askForToken(text) {
  find("main").hidden = true;
  find("token-form").hidden = false;
  notice(token.get() ? `The token was refused: ${text}.` : "");
  token.forget();
  state.silent = true; /* an answer ends the notice */
  show(find("updated"), "Waiting for a token");
  find("token").focus();
}

/* Note which process answers. Returns true for a restarted one: its history, and often its index, begin anew. */
function noteProcess(overview) {
  const restarted = state.started !== 0 && state.started !== overview.started_ms;
  if (restarted) {
    forgetHistory();
    notice(`kv-indexer was restarted at ${clock(overview.started_ms)}. Its history begins there, and its index fills from the workers' events.`);
  } else if (state.silent) {
    notice("");
  }
  state.started = overview.started_ms;
  state.silent = false;
  return restarted;
}

function showFailure(problem) {
  if (problem.kind === "token") {
    askForToken(problem.message);
    return;
  }
  state.silent = true;
  if (problem.kind === "silent")
    notice(`kv-indexer doesn't answer${state.lastAnswer ? `: what is shown is of ${clock(state.lastAnswer)}` : ""}. The page tries again each second.`);
  else if (problem.kind) notice(problem.message);
  else notice(`This page can't show what kv-indexer answers: ${problem.message}. Was it updated? Reload the page.`);
  show(find("updated"), "No answer");
}

/* -- the clockwork ----------------------------------------------------------------------------- */

async function load() {
  const parts = [call("/overview"), loadHistory(), loadWorkers()];
  await Promise.allSettled(parts); /* none may go on beside the next turn */
  const overview = await parts[0];
  if (noteProcess(overview)) parts[1] = loadHistory();
  const [, sample] = await Promise.all(parts);
  find("token-form").hidden = true;
  find("main").hidden = false;
  show(find("version"), `${overview.version}, up ${duration(overview.now_ms - overview.started_ms)}`);
  showTiles(overview, sample);
  showReasons(overview);
  showModels(overview.models);
  showModelRows(overview.models);
  state.lastAnswer = Date.now();
  show(find("updated"), `As of ${clock(state.lastAnswer)}`);
  if (!performance.getEntriesByName("shown").length) performance.mark("shown"); /* for measurements */
  state.every = Math.min(EVERY_MS + overview.ranks, MOST_MS); /* thousands of ranks cost kv-indexer milliseconds a time */
  await showHistory();
}

/** Load all now, and again later. Waits for no answer twice at a time. */
async function turn() {
  clearTimeout(state.timer);
  if (state.busy) {
    state.again = true;
    return;
  }
  state.busy = true;
  let wait;
  try {
    await load();
    wait = state.every;
  } catch (problem) {
    showFailure(problem);
    wait = problem.kind === "token" ? 0 : problem.kind ? AGAIN_MS : state.every;
    if (!problem.kind) console.error(problem);
  } finally {
    state.busy = false;
  }
  if (state.again) {
    state.again = false;
    turn();
  } else if (wait && !state.paused && !document.hidden) {
    state.timer = setTimeout(turn, wait);
  }
}

function pause() {
  state.paused = !state.paused;
  find("pause").setAttribute("aria-pressed", String(state.paused));
  if (state.paused) clearTimeout(state.timer);
  else turn();
}

find("pause").addEventListener("click", pause);
find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(find("token").value.trim());
  find("token").value = "";
  turn();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !state.paused) turn();
  else clearTimeout(state.timer);
});
watchWorkers(turn);
watchCharts();
watchExplain();
turn();
