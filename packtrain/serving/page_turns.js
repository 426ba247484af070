// ---- turns on the page

const views = new WeakMap();  // of a turn: the nodes of each column's answer

function drawTurns() {
  hideTip();
  $("turns").replaceChildren(...talk().turns.map(drawTurn));
  drawEdits();
}

function drawTurn(turn, at) {
  views.set(turn, new Map());
  const edit = el("button", { type: "button", className: "edit", onclick: () => {
    for (const answer of Object.values(turn.answers)) answer.control?.abort();
    talk().turns.pop();
    $("question").value = turn.question;
    drawTurns();
    save();
    $("question").focus();
  } }, "Edit question");
  const question = el("div", { className: "question" }, el("p", {}, turn.question), edit);
  return el("section", { className: "turn", ariaLabel: `Turn ${at + 1}` }, el("h2", { className: "unseen" }, `Turn ${at + 1}`), question,
    el("div", { className: "row" }, ...columns.map(column => drawAnswer(turn, column))));
}

/** Only the last question may be edited. */
function drawEdits() {
  const edits = [...document.querySelectorAll(".question .edit")];
  for (const button of edits) button.hidden = button !== edits.at(-1);
}

function drawAnswer(turn, column) {
  const cell = {
    name: el("h3"), stats: el("span"), text: el("div", { className: "text" }), fault: el("p", { className: "fault", role: "alert" }),
    bar: el("div", { className: "bar" }),
  };
  cell.node = el("article", { className: "answer" }, el("div", { className: "about" }, cell.name, cell.stats), cell.text, cell.fault, cell.bar);
  views.get(turn).set(column.id, cell);
  drawText(turn, column);
  refresh(turn, column);
  return cell.node;
}

function redraw(turn, column) {
  if (!views.get(turn)?.has(column.id)) return;
  drawText(turn, column);
  refresh(turn, column);
}

function drawText(turn, column) {
  const answer = turn.answers[column.id], cell = views.get(turn).get(column.id), text = cell.text;
  if (answer?.editing) {
    const box = el("textarea", { value: answer.text, ariaLabel: `Answer of ${answer.by}`, rows: 4, onkeydown: event => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) settle(turn, column, box.value);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      settle(turn, column);
    } });
    text.replaceChildren(box);
    return box.focus();
  }
  text.setAttribute("aria-live", "polite");
  const parts = answer?.pieces?.length ? answer.pieces : answer?.text ? [{ text: answer.text, tokens: [] }] : [];
  text.replaceChildren(...parts.map(drawPiece));
  firstStop(text);
}

/** Bring all but the text up to date, so that what reads the page aloud hears an answer once. */
function refresh(turn, column) {
  const answer = turn.answers[column.id], cell = views.get(turn)?.get(column.id);
  if (!cell) return;
  const by = answer?.by ?? column.title, isWriting = answer?.state === "writing";
  cell.node.setAttribute("aria-label", `Answer of ${by}`);
  cell.node.classList.toggle("kept", Boolean(answer) && turn.kept === column.id);
  cell.name.textContent = by;
  cell.stats.textContent = answer ? statsOf(answer) : "not asked";
  cell.fault.textContent = answer?.why ?? "";
  cell.text.setAttribute("aria-busy", String(isWriting));
  const focused = cell.bar.contains(document.activeElement) ? document.activeElement.dataset.does : null;
  cell.bar.replaceChildren(...buttons(turn, column, answer, by));
  if (focused !== null) (cell.bar.querySelector(`[data-does="${focused}"]`) ?? cell.bar.firstElementChild)?.focus();
  busy();
}

function statsOf(answer) {
  const parts = [];
  const count = answer.count ?? answer.tokens;
  if (answer.edited) parts.push("edited");
  else if (answer.state === "writing") parts.push("writing");
  else if (count) {
    parts.push(plural(count, "token"));
    if (answer.speed) parts.push(`${answer.speed.toFixed(answer.speed < 10 ? 1 : 0)}/s`);
    if (answer.tokens) parts.push(`perplexity ${Math.exp(-answer.likely / answer.tokens).toFixed(2)}`);
  } else if (answer.state === "done") parts.push("nothing written");
  if (answer.state === "stopped" && !answer.edited) parts.push("stopped");
  if (answer.finish === "length" && !answer.edited) parts.push("cut off");
  if (answer.scales?.length) parts.push(`scale ${answer.scales.join(", ")}`);
  return parts.join(" · ");
}

function buttons(turn, column, answer, by) {
  const button = (does, name, work, more = {}) =>
    el("button", { type: "button", "data-does": does, ariaLabel: `${name}: answer of ${by}`, onclick: work, ...more }, name);
  const again = name => button("again", name, () => { if (checked()) write(turn, column, newSeed()); });
  if (!answer) return [again("Answer")];
  if (answer.state === "writing") return [button("again", "Stop", () => answer.control?.abort())];
  if (answer.editing) return [
    button("save", "Save", () => settle(turn, column, views.get(turn).get(column.id).text.firstElementChild.value)),
    button("edit", "Cancel", () => settle(turn, column))];
  const edit = button("edit", "Edit", () => { answer.editing = true; redraw(turn, column); });
  if (answer.state === "failed") return [again("Retry"), ...(answer.text ? [edit] : [])];
  const kept = turn.kept === column.id;
  const keep = button("keep", kept ? "Kept" : "Keep", () => {
    turn.kept = kept ? null : column.id;
    for (const other of columns) refresh(turn, other);
    say(turn.kept ? `All columns go on from the answer of ${by}.` : "Each column goes on from its own answer.");
    save();
  }, { ariaPressed: String(kept), title: "All columns go on from this answer; it is in the file of kept answers" });
  return [...(usable(answer) ? [keep] : []), again("Regenerate"), edit];
}

/** End the editing of an answer, with a new text or as it was. */
function settle(turn, column, text) {
  const answer = turn.answers[column.id];
  answer.editing = false;
  if (text !== undefined && text !== answer.text) {
    Object.assign(answer, { text, pieces: [], edited: true, state: "done", why: "", gone: undefined });
    save();
  }
  redraw(turn, column);
  views.get(turn).get(column.id).bar.querySelector("[data-does=edit]")?.focus();
}

function busy() {
  const now = writing().length > 0;
  $("stop").hidden = !now;
  $("send").disabled = now;
}
