// ---- columns: the models that are compared

let columns = [];  // id, title, address, model, scale of each adapter; `of`: its model when it was seen last
let columnsFor = "";  // the base and adapters that this server had

const short = hash => (hash ?? "").slice(0, 8);
const nameOf = adapter => adapter.run || stem(adapter.path);

function ownColumns(server) {
  const model = server.models[0] ?? "", { adapters } = server;
  const one = (id, title, scales) => ({ id, title, address: OWN, model, scales });
  const base = one("base", adapters.length ? "base" : stem(model) || "model", adapters.map(() => 0));
  const hashes = adapters.map(({ path, sha256 }) => short(sha256) || path), names = adapters.map(nameOf);
  const isAlone = (list, at) => list.indexOf(list[at]) === list.lastIndexOf(list[at]);
  const tuned = adapters.map((_, at) => one(isAlone(hashes, at) ? hashes[at] : `${hashes[at]}-${at}`,
    isAlone(names, at) ? names[at] : `${names[at]} ${hashes[at]}`, adapters.map((_, other) => Number(other === at))));
  return [base, ...tuned];
}

/** The model that a column asks, as answers remember it: base and adapters by name and hash. */
function modelOf(column) {
  const server = servers.get(column.address);
  if (!server) return column.of ?? { name: column.model, adapters: [] };
  const adapters = server.adapters.map((adapter, at) =>
    ({ name: nameOf(adapter), hash: adapter.sha256, scale: column.scales[at] ?? 0 })).filter(adapter => adapter.scale);
  const name = column.model || server.models[0] || "";
  return { name, hash: server.hash, adapters, address: column.address === OWN ? undefined : column.address };
}

/** By what a turn knows the answers of a column: once it asks another model, earlier answers are not its own. */
function keyOf(column) {
  const { name, hash, adapters, address } = modelOf(column);
  return [column.id, address, short(hash) || name, ...adapters.map(one => short(one.hash) || one.name)].filter(Boolean).join(" ");
}

const columnOf = key => columns.find(column => keyOf(column) === key);

/** A model in words: run and hash of its adapters, else name and hash of the base; `title` needs not be said twice. */
function labelOf(model, title = "") {
  if (!model) return "model not recorded";
  const words = (name, hash) => [name !== title && name, short(hash)].filter(Boolean).join(" ");
  const parts = model.adapters.map(({ name, hash, scale }) => words(name, hash) + (scale === 1 ? "" : ` × ${scale}`));
  return parts.join(" + ") || words(stem(model.name), model.hash);
}

/** Base and adapters with all digits of their hashes. */
function details(model) {
  if (!model) return "This answer was stored before the page remembered models.";
  const hashed = ({ name, hash }) => `${name} (${hash ? `hash ${hash}` : "no hash known"})`;
  return [hashed(model), ...model.adapters.map(one => `adapter ${hashed(one)}, scale ${one.scale}`)].join("; ");
}

/** Read what this server has; its columns stay as they were left unless it has others than then. */
async function begin() {
  const server = await look(OWN);
  const has = JSON.stringify([server.models[0], server.hash, server.adapters.map(one => [one.path, one.sha256])]);
  const left = columns.length ? { has: columnsFor, columns } : stored("columns", {});
  columns = left.has === has && left.columns?.length ? left.columns
    : [...ownColumns(server), ...(left.columns ?? []).filter(column => column.address !== OWN)];
  columnsFor = has;
  store("columns", { has, columns });
  $("model").textContent = server.models[0] ?? "packtrain serve";
  const parts = [...server.adapters.map(one => `${nameOf(one)} ${short(one.sha256)}`),
    server.context && `a context of ${server.context.toLocaleString("en")} tokens`, server.slots && plural(server.slots, "slot")];
  $("served").textContent = parts.filter(Boolean).join(", ");
  document.title = `${server.models[0] ?? "packtrain"} – packtrain serve`;
  showDefaults(server.defaults);
  for (const address of new Set(columns.map(column => column.address)))
    if (address !== OWN && !servers.has(address)) reread(address).catch(() => {});
}

/** Read what a server has; draw the page again if columns ask other models than before. */
async function reread(address) {
  const before = columns.map(keyOf).join();
  await (address === OWN ? begin() : look(address));
  if (columns.map(keyOf).join() === before) return;
  if (before) say("A server has another model now. Earlier answers stay under the model that wrote them.");
  drawColumns();
  drawTurns();
}

/** Read what all servers have, so that each answer is remembered with the model that writes it. */
async function rereadAll() {
  const addresses = [...new Set(columns.map(column => column.address))];
  const all = addresses.map(address => reread(address).catch(() => {}));  // the request itself says why it fails
  await Promise.race([Promise.all(all), new Promise(done => setTimeout(done, 3000))]);
}

function columnsChanged() {
  store("columns", { has: columnsFor, columns });
  drawChoices();
}

function drawColumns() {
  for (const column of columns) column.of = modelOf(column);
  $("columns").replaceChildren(...columns.map(drawColumn));
  drawLinks();
  drawChoices();
}

function drawColumn(column) {
  const server = servers.get(column.address);
  const title = el("input", { type: "text", value: column.title, ariaLabel: "Title of the column", onchange: () => {
    const before = column.title;
    column.title = title.value.trim() || before;
    title.value = column.title;
    const key = keyOf(column);
    for (const turn of talks.flatMap(one => one.turns)) {
      const answer = turn.answers[key], cell = views.get(turn)?.get(key);
      if (answer && answer.by !== before) continue;
      if (answer) answer.by = column.title;
      if (cell) drawNames(cell, answer, column.title);  // the rest stays as it is, what has the focus or is pressed included
    }
    node.ariaLabel = column.title;
    columnsChanged();
    save();
  } });
  const remove = el("button", { type: "button", ariaLabel: `Remove ${column.title}`, title: "Remove this column",
    disabled: columns.length < 2, onclick: () => {
      const key = keyOf(column), before = columns;
      for (const turn of talk().turns) turn.answers[key]?.control?.abort();
      setColumns(columns.filter(other => other !== column));
      offerUndo(`${column.title} is no longer compared.`, "Undo remove", () => setColumns(before));
      $("undo").focus();
    } }, "×");
  const node = el("section", { className: "column", ariaLabel: column.title }, el("div", { className: "field" }, title, remove));
  if (column.address !== OWN) {
    const link = el("span", { className: "link", role: "status" });
    link.dataset.address = column.address;
    node.append(el("p", { className: "address" }, column.address, " ", link));
  }
  node.append(el("p", { className: "model", title: details(modelOf(column)) }, labelOf(modelOf(column))));
  if (server?.models.length > 1)
    node.append(el("select", { ariaLabel: `Model of ${column.title}`, onchange: event => {
      column.model = event.target.value;
      asksOther(column, node);
      drawTurns();
    } }, ...server.models.map(name => el("option", { selected: name === column.model }, name))));
  for (const [at, adapter] of (server?.adapters ?? []).entries()) node.append(drawScale(column, at, nameOf(adapter), node));
  return node;
}

/** A column has another scale or model: its answers may be others. */
function asksOther(column, node) {
  column.of = modelOf(column);
  node.querySelector(".model").textContent = labelOf(column.of);
  node.querySelector(".model").title = details(column.of);
  columnsChanged();
}

function setColumns(list) {
  columns = list;
  columnsChanged();
  drawColumns();
  drawTurns();
}

function drawScale(column, at, name, node) {
  const shown = el("output", {}, String(column.scales[at] ?? 0));
  const slider = el("input", { type: "range", min: 0, max: 2, step: 0.05, value: column.scales[at] ?? 0,
    ariaLabel: `Scale of ${name} in ${column.title}`, oninput: () => {
      const before = keyOf(column);
      column.scales[at] = Number(slider.value);
      shown.textContent = slider.value;
      asksOther(column, node);
      if (keyOf(column) !== before) drawTurns();
    } });
  return el("div", { className: "field" }, el("span", { className: "name", title: name }, name), slider, shown);
}

$("add").addEventListener("click", () => { $("other").querySelector(".fault").textContent = ""; $("other").showModal(); });
$("cancel").addEventListener("click", () => $("other").close());
$("other").firstElementChild.addEventListener("submit", async event => {
  event.preventDefault();
  const form = event.target, fault = form.querySelector(".fault");
  const address = form.address.value.trim().replace(/\/+$/, "").replace(/\/v1$/, "") || OWN;
  if (form.key.value) { keys[address] = form.key.value.trim(); store("keys", keys, sessionStorage); }
  fault.textContent = "";
  try {
    const server = await look(address), model = form.model.value.trim() || server.models[0] || "";
    const id = `${address} ${model} ${Date.now()}`;
    columns = [...columns, { id, title: stem(model) || address, address, model, scales: server.adapters.map(one => one.scale) }];
  } catch (error) {
    fault.textContent = error instanceof Gone
      ? `${error.message} Is it running, and may pages of other addresses ask it (CORS)?` : error.message;
    return;
  }
  form.reset();
  $("other").close();
  setColumns(columns);
  knock(columns.at(-1).address);
});
