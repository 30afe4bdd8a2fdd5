/* Requests to the kv-indexer that served the page. */

const TIMEOUT_MS = 10000;
const TOKEN = "kv-indexer-token"; /* in the tab's sessionStorage */

/** kind: "token" (401), "refused" (other answers), "silent" (no answer). */
export class Failure extends Error {
  constructor(kind, text) {
    super(text);
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (text) => sessionStorage.setItem(TOKEN, text),
  forget: () => sessionStorage.removeItem(TOKEN),
};

/**
 * Parse JSON. Whole numbers of 16 digits and more become strings: ids and hashes have 64 bits, and numbers
 * of JavaScript keep 53 of them.
 */
export function parse(text) {
  const pieces = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;
  return JSON.parse(text.replace(pieces, (piece) => (/^-?\d{16,}$/.test(piece) ? `"${piece}"` : piece)));
}

async function send(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch {
    throw new Failure("silent", "no answer");
  }
}

/** Send a request; @body is JSON text, or undefined for GET. Returns the parsed answer, or throws a Failure. */
export async function call(path, body) {
  const headers = new Headers({ Accept: "application/json" });
  if (body !== undefined) headers.set("Content-Type", "application/json");
  try {
    if (token.get()) headers.set("Authorization", `Bearer ${token.get()}`);
  } catch {
    throw new Failure("token", "it has characters that no token has");
  }
  const answer = await send(path, { method: body === undefined ? "GET" : "POST", headers, body });
  let text, value;
  try {
    text = await answer.text();
  } catch {
    throw new Failure("silent", "the answer broke off");
  }
  try {
    value = parse(text);
  } catch {
    throw new Failure("refused", `an answer that is no JSON (status ${answer.status})`);
  }
  if (answer.ok) return value;
  const why = value.explain ? `${value.error}: ${value.explain.text}` : value.error;
  throw new Failure(answer.status === 401 ? "token" : "refused", String(why ?? `status ${answer.status}`));
}
