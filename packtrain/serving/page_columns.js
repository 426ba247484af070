// ---- columns: the models that are compared

let columns = [];  // id, title, address, model, scale of each adapter

function ownColumns(server) {
  const model = server.models[0] ?? "", count = server.adapters.length;
  const one = (id, title, scales) => ({ id, title, address: OWN, model, scales });
  const base = one("base", count ? "base" : stem(model) || "model", Array(count).fill(0));
  const tuned = server.adapters.map(({ path }, at) =>
    one(`adapter${at}`, count === 1 ? "tuned" : stem(path), server.adapters.map((_, other) => Number(other === at))));
  return [base, ...tuned];
}

/** Read what this server has; its columns stay as they were left unless it has others than then. */
async function begin() {
  const server = await look(OWN);
  const has = JSON.stringify([server.models[0], server.adapters.map(one => one.path)]);
  const left = stored("columns", {});
  if (left.has === has && left.columns?.length) columns = left.columns;
  else columns = [...ownColumns(server), ...(left.columns ?? []).filter(column => column.address !== OWN)];
  store("columns", { has, columns });
  $("model").textContent = server.models[0] ?? "packtrain serve";
  const parts = [server.adapters.length && plural(server.adapters.length, "adapter"),
    server.context && `a context of ${server.context.toLocaleString("en")} tokens`, server.slots && plural(server.slots, "slot")];
  $("served").textContent = parts.filter(Boolean).join(", ");
  document.title = `${server.models[0] ?? "packtrain"} – packtrain serve`;
  showDefaults(server.defaults);
  for (const address of new Set(columns.map(column => column.address)))
    if (address !== OWN && !servers.has(address)) look(address).then(drawColumns).catch(() => {});
  drawColumns();
  drawTurns();
}

function columnsChanged() {
  store("columns", { ...stored("columns", {}), columns });
  drawChoices();
}

function drawColumns() {
  $("columns").replaceChildren(...columns.map(drawColumn));
  drawChoices();
}

function drawColumn(column) {
  const server = servers.get(column.address);
  const title = el("input", { type: "text", value: column.title, ariaLabel: "Title of the column", onchange: () => {
    const before = column.title;
    column.title = title.value.trim() || before;
    title.value = column.title;
    for (const turn of talks.flatMap(one => one.turns)) {
      const answer = turn.answers[column.id], cell = views.get(turn)?.get(column.id);
      if (answer && answer.by !== before) continue;
      if (answer) answer.by = column.title;
      if (cell) cell.name.textContent = column.title;  // the rest stays as it is, what has the focus or is pressed included
    }
    node.ariaLabel = column.title;
    columnsChanged();
    save();
  } });
  const remove = el("button", { type: "button", ariaLabel: `Remove ${column.title}`, title: "Remove this column",
    disabled: columns.length < 2, onclick: () => {
      for (const turn of talk().turns) turn.answers[column.id]?.control?.abort();
      columns = columns.filter(other => other !== column);
      columnsChanged();
      drawColumns();
      drawTurns();
      $("add").focus();
    } }, "×");
  const node = el("section", { className: "column", ariaLabel: column.title }, el("div", { className: "field" }, title, remove));
  if (column.address !== OWN) node.append(el("p", { className: "address" }, column.address));
  if (server?.models.length > 1)
    node.append(el("select", { ariaLabel: `Model of ${column.title}`, onchange: event => {
      column.model = event.target.value;
      columnsChanged();
    } }, ...server.models.map(name => el("option", { selected: name === column.model }, name))));
  for (const [at, adapter] of (server?.adapters ?? []).entries()) node.append(drawScale(column, at, stem(adapter.path)));
  return node;
}

function drawScale(column, at, name) {
  const shown = el("output", {}, String(column.scales[at] ?? 0));
  const slider = el("input", { type: "range", min: 0, max: 2, step: 0.05, value: column.scales[at] ?? 0,
    ariaLabel: `Scale of ${name} in ${column.title}`, oninput: () => {
      column.scales[at] = Number(slider.value);
      shown.textContent = slider.value;
      columnsChanged();
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
    columns.push({ id, title: stem(model) || address, address, model, scales: server.adapters.map(one => one.scale) });
  } catch (error) {
    fault.textContent = error instanceof Gone
      ? `${error.message} Is it running, and may pages of other addresses ask it (CORS)?` : error.message;
    return;
  }
  form.reset();
  $("other").close();
  columnsChanged();
  drawColumns();
  drawTurns();
});
