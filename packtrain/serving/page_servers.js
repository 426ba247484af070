"use strict";
const $ = id => document.getElementById(id);
const OWN = new URL(".", location.href).href.replace(/\/$/, "");
const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens"];

/** An element; text is never read as HTML. */
function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function stored(name, otherwise, store = localStorage) {
  try { return JSON.parse(store.getItem(`packtrain.${name}`)) ?? otherwise; } catch { return otherwise; }
}

/** Whether the browser's store has room for a value. */
function store(name, value, where = localStorage) {
  try { where.setItem(`packtrain.${name}`, JSON.stringify(value)); } catch { return false; }
  return true;
}

const HINT = matchMedia("(pointer: coarse)").matches ? "Tap a token to see its probability and the likeliest others."
  : "Enter sends, Shift+Enter breaks the line, Esc stops. Arrow keys go through an answer's tokens.";
const say = (text = HINT) => { $("said").textContent = $("said").title = text; };
const stem = path => path.split(/[\\/]/).pop().replace(/\.gguf$/i, "");
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// ---- servers

const keys = stored("keys", {}, sessionStorage);  // of an address; gone with the tab
const servers = new Map();  // address: models, hash of the base, adapters, context, defaults

class Refusal extends Error {
  constructor(status, { message = "", type = "", ...more } = {}) {
    super(Refusal.words(status, String(message).replace(/\.$/, ""), type, more));
    this.status = status;
  }

  static words(status, message, type, more) {
    if (type === "exceed_context_size_error")
      return `The conversation has ${plural(more.n_prompt_tokens, "token")}, the context room for ${more.n_ctx.toLocaleString("en")}: `
        + "start a new conversation, or serve with a larger --ctx-size.";
    if (status === 401) return "The server wants an API key: give it above, then try again.";
    if (status === 404) return `The server does not know this request (${message || "not found"}): does it have OpenAI's API?`;
    if (status === 503) return `The server is busy: ${message || "no slot is free"}. Try again in a moment.`;
    if (status >= 500) return `The server failed (${status}): ${message || "it does not say why"}.`;
    return `The server refused the request: ${message || `status ${status}`}.`;
  }
}

class Gone extends Error {}  // the server does not answer, or no more

async function call(address, route, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (keys[address]) headers.Authorization = `Bearer ${keys[address]}`;
  let response;
  try {
    response = await fetch(address + route, { ...options, headers: options.body || keys[address] ? headers : {} });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Gone(`The server at ${address} cannot be reached.`);
  }
  if (response.ok) return response;
  let error;
  try { error = (await response.json()).error; } catch { error = {}; }
  if (response.status === 401) wantKey(address);
  throw new Refusal(response.status, typeof error === "string" ? { message: error } : error ?? {});
}

/** What a server has: models, adapters with scales, the length of its context, its defaults. Throws Gone, Refusal. */
async function look(address) {
  const get = async route => (await call(address, route)).json();
  const maybe = async route => { try { return await get(route); } catch { return null; } };
  const listed = (await get("/v1/models")).data ?? [];
  const [adapters, props] = await Promise.all([maybe("/lora-adapters"), maybe("/props")]);
  const server = {
    models: listed.map(one => one.id), hash: props?.model_hash, context: listed[0]?.meta?.n_ctx,
    adapters: Array.isArray(adapters) ? adapters : [],
    defaults: props?.default_generation_settings?.params ?? {}, slots: props?.total_slots,
  };
  servers.set(address, server);
  return server;
}

// ---- the connection to each server

const links = new Map();  // address: whether the server answers, and since when

/** Ask all servers again and again whether they are there; read one that is back. */
async function watch() {
  await Promise.all([...new Set([OWN, ...columns.map(column => column.address)])].map(knock));
  setTimeout(watch, 2500);
}

async function knock(address) {
  const isOwn = address === OWN, wasGone = links.get(address)?.up === false;
  try {
    // other servers need not let pages ask for their health: an answer that cannot be read is one, too
    const answer = await fetch(`${address}/health`, { signal: AbortSignal.timeout(10_000), mode: isOwn ? "cors" : "no-cors" });
    if (isOwn && !answer.ok) throw new Gone();
    if (wasGone) await reread(address);
  } catch (fault) {
    if (!(fault instanceof Refusal)) return setLink(address, false);
  }
  setLink(address, true);
}

function setLink(address, up) {
  const before = links.get(address);
  if (before?.up === up) return;
  links.set(address, { up, since: new Date() });
  drawLinks();
  if (!before || !up) return;
  for (const turn of talk().turns)
    for (const [key, answer] of Object.entries(turn.answers)) {
      if (!answer.gone || (answer.of?.address ?? OWN) !== address) continue;
      answer.why = `${answer.gone} It is back: try again.`;
      refresh(turn, key);
    }
}

const linkText = address => {
  const link = links.get(address);
  if (!link) return "connecting";
  return link.up ? "connected" : `server gone since ${link.since.toLocaleTimeString("en-GB")}`;
};

function drawLinks() {
  for (const node of document.querySelectorAll(".link")) {
    const text = linkText(node.dataset.address || OWN);
    if (node.textContent !== text) node.textContent = text;
    node.classList.toggle("gone", links.get(node.dataset.address || OWN)?.up === false);
  }
}

function wantKey(address) {
  $("whose").textContent = address === OWN ? "this server" : address;
  $("access").dataset.address = address;
  $("access").hidden = false;
}

$("access").addEventListener("submit", event => {
  event.preventDefault();
  const address = $("access").dataset.address;
  keys[address] = $("key").value.trim();
  store("keys", keys, sessionStorage);
  $("access").hidden = true;
  $("key").value = "";
  reread(address).then(() => say(), fault => say(fault.message));
  $("question").focus();
});
