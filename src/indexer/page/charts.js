/* The last hour: charts where Chart.js is built in, and the same samples as a table. */
import { call } from "./api.js";
import { bytes, clock, count, find, make, percent, rough, show } from "./format.js";

const KEPT = 360; /* samples, as kv-indexer keeps them */
const rate = (n, sample) => (1000 * n) / sample.span_ms;
const share = (sample) => (sample.query_blocks ? (100 * sample.matched_blocks) / sample.query_blocks : null);
const mebi = (n) => n / 1048576;

/* Each line: name, colour of page.css, value of a sample (null: none). */
const CHARTS = [
  { title: "Queries a second", lines: [["queries", "gpu", (s) => rate(s.queries, s)]] },
  { title: "Query latency, ms", lines: [["half are faster", "gpu", (s) => s.p50_ms], ["99 % are faster", "disk", (s) => s.p99_ms]] },
  { title: "Blocks found of those asked for, %", max: 100, lines: [["found", "cpu", share]] },
  { title: "Events a second", lines: [["events", "cpu", (s) => rate(s.events, s)]] },
  { title: "Blocks held, by tier", lines: [["device", "gpu", (s) => s.tier_blocks.device], ["host", "cpu", (s) => s.tier_blocks.host_pinned],
    ["disk", "disk", (s) => s.tier_blocks.disk], ["external", "external", (s) => s.tier_blocks.external]] },
  { title: "Prefix tree, blocks", lines: [["blocks", "gpu", (s) => s.blocks]] },
  { title: "Event streams", lines: [["active", "cpu", (s) => s.active_ranks], ["partial views", "disk", (s) => s.partial_ranks]] },
  { title: "Memory, MiB", lines: [["process", "external", (s) => mebi(s.resident_bytes)], ["index", "gpu", (s) => mebi(s.index_bytes)]] },
];
const COLUMNS = [
  ["Time", (s) => clock(s.time_ms)], ["Queries/s", (s) => rough(rate(s.queries, s))], ["p50 ms", (s) => (s.p50_ms === null ? "–" : rough(s.p50_ms))],
  ["p99 ms", (s) => (s.p99_ms === null ? "–" : rough(s.p99_ms))], ["Found", (s) => percent(s.matched_blocks, s.query_blocks)],
  ["Events/s", (s) => rough(rate(s.events, s))], ["Tree", (s) => count(s.blocks)], ["Held", (s) => count(s.holder_blocks)],
  ["Active", (s) => `${count(s.active_ranks)} of ${count(s.ranks)}`], ["Partial", (s) => count(s.partial_ranks)],
  ["Index", (s) => bytes(s.index_bytes)], ["Process", (s) => bytes(s.resident_bytes)],
];

const state = { samples: [], next: 0, interval: 10000, charts: [], drawn: false, told: false, library: null };

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function optionsOf(chart) {
  const grid = { color: colour("line") }, ticks = { color: colour("dim"), maxTicksLimit: 5 };
  return {
    animation: false, responsive: true, maintainAspectRatio: false, normalized: true, parsing: false,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    elements: { point: { radius: 0, hitRadius: 8 }, line: { borderWidth: 2 } },
    plugins: {
      legend: { display: chart.lines.length > 1, align: "start", labels: { color: colour("text"), boxWidth: 12, boxHeight: 2 } },
      tooltip: { callbacks: { title: (items) => clock(items[0].parsed.x), label: (item) => `${item.dataset.label}: ${rough(item.parsed.y)}` } },
    },
    scales: {
      x: { type: "linear", grid, ticks: { ...ticks, maxRotation: 0, includeBounds: false, callback: (ms) => clock(ms, span() < 600000) } },
      y: { beginAtZero: true, max: chart.max, grid, ticks: { ...ticks, callback: (n) => rough(n) } },
    },
  };
}

const span = () => (state.samples.length > 1 ? state.samples[state.samples.length - 1].time_ms - state.samples[0].time_ms : 0);

function build() {
  find("charts").replaceChildren();
  state.charts = CHARTS.map((chart) => {
    const canvas = make("canvas");
    canvas.setAttribute("role", "img");
    find("charts").append(make("figure", "", make("figcaption", "", chart.title), make("div", "plot", canvas)));
    const datasets = chart.lines.map(([label, name]) => ({ label, data: [], borderColor: colour(name), backgroundColor: colour(name) }));
    return { ...chart, canvas, plot: new Chart(canvas, { type: "line", data: { datasets }, options: optionsOf(chart) }) };
  });
}

/* Say in words what a chart shows, for those who don't see it. */
function describe(chart) {
  const last = chart.lines.map(([name, , value]) => [name, value(state.samples[state.samples.length - 1])]);
  return `${chart.title}. Last: ${last.map(([name, n]) => `${name} ${n === null ? "none" : rough(n)}`).join(", ")}. The table below has all values.`;
}

function draw() {
  for (const chart of state.charts) {
    chart.lines.forEach(([, , value], i) => {
      chart.plot.data.datasets[i].data = state.samples.map((s) => ({ x: s.time_ms, y: value(s) }));
    });
    chart.plot.options.scales.x.min = state.samples[0].time_ms;
    chart.plot.options.scales.x.max = Math.max(state.samples[state.samples.length - 1].time_ms, state.samples[0].time_ms + state.interval);
    chart.canvas.setAttribute("aria-label", describe(chart));
    chart.plot.update("none");
  }
}

function fillTable() {
  if (!find("hour-table").open) return;
  const rows = state.samples.map((sample) => make("tr", "", ...COLUMNS.map(([, text], i) => {
    const cell = make(i ? "td" : "th", i ? "number" : "", text(sample));
    if (!i) cell.scope = "row";
    return cell;
  })));
  find("hour-rows").replaceChildren(...rows.reverse());
}

function noteOf() {
  if (!state.interval) return "kv-indexer runs with --history-interval 0: it keeps no history.";
  if (!state.samples.length) return `The first sample comes ${rough(state.interval / 1000)} s after the start.`;
  const missing = window.Chart ? "" : " This kv-indexer was built without Chart.js (Debian: libjs-chart.js): no charts, the table has all values.";
  return `One sample each ${rough(state.interval / 1000)} s, since ${clock(state.samples[0].time_ms)}.${missing}`;
}

/* Place all samples before the last one by their spans: the server's clock may have been set meanwhile. */
function placeByLast() {
  for (let i = state.samples.length - 1; i > 0; i--) state.samples[i - 1].time_ms = state.samples[i].time_ms - state.samples[i].span_ms;
}

/** Fetch the samples that are new. Returns the last one, or undefined. */
export async function loadHistory() {
  const answer = await call(`/history?from=${state.next}`);
  if (answer.from > state.next) state.samples = []; /* the page slept for more than an hour */
  state.samples = [...state.samples, ...answer.samples].slice(-KEPT);
  placeByLast();
  state.next = answer.next;
  state.interval = answer.interval_ms;
  state.drawn &&= !answer.samples.length;
  return state.samples[state.samples.length - 1];
}

/* Load Chart.js, if this kv-indexer has it, once the rest of the page is shown. */
function loadLibrary() {
  state.library ??= new Promise((resolve) => {
    const script = make("script");
    script.addEventListener("load", resolve);
    script.addEventListener("error", resolve);
    script.src = "/ui/chart.js";
    document.head.append(script);
  });
  return state.library;
}

/** Show the samples, if there are new ones. */
export async function showHistory() {
  await loadLibrary();
  show(find("hour-note"), noteOf());
  if (!window.Chart && !state.told) find("hour-table").open = state.told = true;
  if (state.drawn || !state.samples.length) return;
  state.drawn = true;
  if (window.Chart && !state.charts.length) build();
  draw();
  fillTable();
}

/** Begin anew: another process answers. */
export function forgetHistory() {
  state.samples = [];
  state.next = 0;
  state.drawn = false;
}

export function watchCharts() {
  find("hour-head").append(...COLUMNS.map(([name], i) => {
    const cell = make("th", i ? "number" : "", name);
    cell.scope = "col";
    return cell;
  }));
  find("hour-table").addEventListener("toggle", fillTable);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    state.charts.forEach((chart) => chart.plot.destroy());
    state.charts = [];
    if (window.Chart && state.samples.length) {
      build();
      draw();
    }
  });
}
