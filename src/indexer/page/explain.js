/* The explain box: a prompt in one of several forms becomes a body of POST /explain, and its answer a table. */
import { call, parse } from "./api.js";
import { count, fillRows, find, make, rowOf, show } from "./format.js";
import { fillMark } from "./workers.js";

const LIMIT = 100; /* ranks at a time */
const TIERS = ["gpu", "cpu", "disk", "external"];
const HASHES = ["block_hashes", "sequence_hashes"];
const state = { models: [], body: null, ranks: [], blockSize: 0, blocks: 0 };

/* -- reading ----------------------------------------------------------------------------------- */

/** Read a list of whole numbers, as text so that all 64 bits stay. Returns null for anything else. */
function numbers(list) {
  const found = [];
  for (const item of list) {
    const text = String(item);
    if (/^-?\d+$/.test(text)) found.push(text);
    else if (/^0x[0-9a-f]+$/i.test(text)) found.push(BigInt(text).toString());
    else return null;
  }
  return found;
}

function promptOf(request) {
  for (const name of ["token_ids", "prompt_token_ids", "input_ids", "prompt"]) {
    const value = request[name];
    if (Array.isArray(value)) return Array.isArray(value[0]) ? value[0] : value;
  }
  return null;
}

const TEXT = "This request has text, and an index knows token ids alone: only the engine's tokenizer and chat template make these of it. " +
  "Paste the token ids; vLLM and SGLang answer POST /tokenize with them.";

/* Read a request's fields. Members that /explain knows go along as they are. */
function readRequest(request) {
  const fields = {};
  for (const name of HASHES) if (Array.isArray(request[name])) fields[name] = request[name];
  const tokens = promptOf(request);
  if (tokens && !HASHES.some((name) => fields[name])) fields.token_ids = tokens;
  for (const name of ["tenant_id", "routing_group", "lora_name", "cache_salt", "mm_objects", "block_mm_infos"])
    if (request[name] !== undefined && request[name] !== null) fields[name] = request[name];
  fields.model_name = request.model_name ?? request.model;
  if (fields.token_ids || HASHES.some((name) => fields[name])) return fields;
  if (typeof request.prompt === "string" || request.messages || request.input) throw new Error(TEXT);
  throw new Error("No token_ids, prompt of token ids, block_hashes or sequence_hashes is in this JSON.");
}

function readText(text, kind) {
  const name = kind === "auto" ? "token_ids" : kind;
  let value;
  try {
    value = parse(text);
  } catch {
    value = null;
  }
  if (value && typeof value === "object" && !Array.isArray(value)) return readRequest(value);
  if (Array.isArray(value)) return { [name]: value };
  if (text.trim().startsWith("{")) throw new Error("This begins as JSON, and isn't: a quote, comma or bracket is missing.");
  return { [name]: text.split(/[\s,[\]()]+/).filter(Boolean) };
}

/* Write the body by hand where numbers have 64 bits. */
function bodyOf(fields) {
  const parts = [];
  for (const [name, value] of Object.entries(fields)) {
    if (name !== "token_ids" && !HASHES.includes(name)) {
      if (value !== undefined) parts.push(`${JSON.stringify(name)}:${JSON.stringify(value).replace(/("mm_hash":)"(-?\d+)"/g, "$1$2")}`);
      continue;
    }
    const list = numbers(value);
    if (!list) throw new Error(`${name === "token_ids" ? "Token ids" : "Hashes"} are whole numbers; hashes may be written as 0x….`);
    parts.push(`"${name}":[${list.join(",")}]`);
  }
  return `{${parts.join(",")}}`;
}

function readForm() {
  const fields = readText(find("explain-text").value, find("explain-kind").value);
  const chosen = state.models[find("explain-model").selectedIndex];
  fields.model_name ??= chosen?.model_name ?? "default";
  if (fields.tenant_id === undefined && fields.routing_group === undefined && fields.model_name === chosen?.model_name)
    fields.tenant_id = chosen.tenant_id;
  if (find("explain-lora").value) fields.lora_name = find("explain-lora").value;
  if (find("explain-salt").value) fields.cache_salt = find("explain-salt").value;
  return bodyOf(fields);
}

/* -- showing ----------------------------------------------------------------------------------- */

function fillMatch(cell, rank) {
  const bar = cell.children[0] ?? cell.appendChild(make("div", "bar"));
  const text = cell.children[1] ?? cell.appendChild(make("span"));
  bar.setAttribute("aria-hidden", "true");
  let before = 0;
  bar.replaceChildren(...TIERS.map((tier) => {
    const part = make("span", tier);
    part.style.width = `${state.blocks ? (100 * (rank.matched_blocks[tier] - before)) / state.blocks : 0}%`;
    before = Math.max(before, rank.matched_blocks[tier]);
    return part;
  }));
  show(text, `${count(before)} of ${count(state.blocks)} blocks, ${count(rank.matched_tokens)} tokens`);
}

function endOf(rank) {
  if (rank.stops_at === undefined) return ["the end", []];
  const details = [`tokens ${count(rank.stops_at * state.blockSize)} to ${count((rank.stops_at + 1) * state.blockSize - 1)}`];
  if (rank.stops_at_hash !== undefined) details.push(`hash ${rank.stops_at_hash}`);
  details.push(rank.others_with_block === 1 ? "1 other rank has it" : `${count(rank.others_with_block)} ranks have it`);
  return [`block ${count(rank.stops_at)}`, details];
}

function cutText(cut) {
  if (!cut) return "";
  const ended = Object.entries(cut.ended_by).map(([tier, group]) => `${tier}: ${group === "together" ? "all groups together" : `group ${group}`}`);
  const groups = cut.groups.map((g) => `${g.group ?? "?"} (${g.kind ?? "own blocks"}) allows ${count(g.gpu)} tokens on the device`);
  return `Ended by ${ended.join(", ")}. Groups: ${groups.join("; ")}.`;
}

function fill(row, rank) {
  const [id, match, ends, why, view] = row.children;
  show(id, rank.dp_rank ? `${rank.instance_id}, rank ${rank.dp_rank}` : String(rank.instance_id));
  fillMatch(match, rank);
  const [end, details] = endOf(rank);
  ends.replaceChildren(make("span", "", end), ...details.map((text) => make("span", "detail", text)));
  why.replaceChildren(make("code", "", rank.reason), make("span", "detail", [rank.text, rank.namespace ? `Known ${rank.namespace}.` : "",
    rank.event_block_size ? `Its events have blocks of ${rank.event_block_size} tokens.` : "", cutText(rank.cut)].filter(Boolean).join(". ")));
  fillMark(view, rank.partial ? "partial" : "whole", rank.partial ? "warn" : "good",
    rank.partial ? `may hold more or less than is shown: ${rank.partial_reasons.join(", ")}` : "", rank.status === "active" ? "" : `stream: ${rank.status}`);
}

function showAnswer(answer, blocks) {
  const { explain } = answer;
  state.blockSize = explain.block_size;
  state.blocks = answer.prompt_blocks;
  const lines = [`${explain.text[0].toUpperCase()}${explain.text.slice(1)}.`, `${count(answer.prompt_blocks)} full blocks of ${count(explain.block_size)} tokens` +
    `${explain.tokens === undefined ? "" : ` in ${count(explain.tokens)} tokens`}. ` +
    `${count(explain.holders_matched)} of ${count(answer.total)} ranks hold the first block. Partial views: ${count(explain.partial_ranks)}.`];
  if (answer.first_named_block) lines.push(`The first hash names block ${count(answer.first_named_block)} of the prompt.`);
  if (explain.hint) lines.push(explain.hint);
  find("explain-result").replaceChildren(...lines.map((line) => make("p", "", line)));
  find("explain-ranks").hidden = !answer.total;
  state.ranks = blocks;
  fillRows(find("explain-rows"), state.ranks, (rank) => `${rank.instance_id}:${rank.dp_rank}`, () => rowOf("id", "match", "ends", "why", ""), fill);
  find("explain-more").hidden = state.ranks.length >= answer.total;
}

function showProblem(text) {
  find("explain-result").replaceChildren(make("p", "problem", text));
  find("explain-ranks").hidden = true;
}

async function ask(offset) {
  try {
    if (!offset) state.body = readForm();
    const answer = await call(`/explain?limit=${LIMIT}&offset=${offset}`, state.body);
    showAnswer(answer, offset ? [...state.ranks, ...answer.ranks] : answer.ranks);
  } catch (problem) {
    showProblem(problem.kind === "silent" ? "kv-indexer doesn't answer." : problem.message);
  }
}

/** Offer the models of GET /overview. */
export function showModels(models) {
  const select = find("explain-model"), names = models.map((m) => (m.tenant_id === "default" ? m.model_name : `${m.model_name} (${m.tenant_id})`));
  state.models = models;
  if (names.length === select.length && names.every((name, i) => select.options[i].textContent === name)) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", "", name)));
  if (names.includes(chosen)) select.value = chosen;
}

export function watchExplain() {
  find("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(0);
  });
  find("explain-more").addEventListener("click", () => ask(state.ranks.length));
}
