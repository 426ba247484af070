// ---- turns on the page

const views = new WeakMap();  // of a turn: the nodes of each answer, by its key
const EXAMPLES = ["What is the capital of Norway?", "Explain in two sentences what a lighthouse is for.",
  "Write a short, polite reply to a customer whose order is late.", "Name three fruits, as a JSON array."];

function drawTurns() {
  hideTip();
  const { turns } = talk();
  $("turns").replaceChildren(...(turns.length ? turns.map(drawTurn) : [drawExamples()]));
  drawEdits();
  drawTint();
  busy();
}

/** Questions to begin with: those asked last in other conversations, and a few for any model. */
function drawExamples() {
  const asked = [...new Set(talks.flatMap(one => one.turns.slice(0, 1).map(turn => turn.question)).reverse())];
  const list = (name, questions) => questions.length ? [el("h2", {}, name), ...questions.map(question =>
    el("button", { type: "button", onclick: () => {
      if (writing().length || preparing || !columns.length) return;
      say();
      ask(question);
      $("question").focus();
    } }, question))] : [];
  return el("section", { className: "examples", ariaLabel: "Questions to begin with" },
    ...list("Ask all models one of these, or a question of your own", EXAMPLES),
    ...list("Asked before", asked.filter(question => !EXAMPLES.includes(question)).slice(0, 4)));
}

function drawTurn(turn, at) {
  views.set(turn, new Map());
  const edit = el("button", { type: "button", className: "edit", onclick: () => editQuestion(talk(), turn) }, "Edit question");
  const question = el("div", { className: "question" }, el("p", {}, turn.question), edit);
  const node = el("section", { className: "turn", ariaLabel: `Turn ${at + 1}` }, el("h2", { className: "unseen" }, `Turn ${at + 1}`), question,
    el("div", { className: "row" }, ...columns.map(column => drawAnswer(turn, keyOf(column)))));
  const others = Object.keys(turn.answers).filter(key => !columnOf(key) && (turn.answers[key].text || turn.answers[key].control));
  if (others.length) {
    const names = others.map(key => labelOf(turn.answers[key].of)).join(", ");
    node.append(el("details", { className: "others", open: others.includes(turn.kept) },
      el("summary", {}, `${plural(others.length, "answer")} of ${others.length === 1 ? "a model" : "models"} not compared now: ${names}`),
      el("div", { className: "row" }, ...others.map(key => drawAnswer(turn, key)))));
  }
  return node;
}

function editQuestion(one, turn) {
  for (const answer of Object.values(turn.answers)) answer.control?.abort();
  one.turns.splice(one.turns.indexOf(turn), 1);
  drawTurns();
  save();
  offerUndo("The question's answers are deleted.", "Undo edit", () => {
    one.turns.push(turn);
    $("question").value = "";
    show(talks.indexOf(one));
  });
  $("question").value = turn.question;
  $("question").focus();
}

/** Only the last question may be edited. */
function drawEdits() {
  const edits = [...document.querySelectorAll(".question .edit")];
  for (const button of edits) button.hidden = button !== edits.at(-1);
}

function drawAnswer(turn, key) {
  const cell = {
    name: el("h3"), model: el("span", { className: "model" }), stats: el("span"), lacks: el("span", { className: "lacks" }),
    text: el("div", { className: "text" }), fault: el("p", { className: "fault", role: "alert" }), bar: el("div", { className: "bar" }),
  };
  const more = el("button", { type: "button", className: "more", onclick: () => unfold(cell.node, !cell.node.matches(".open")) });
  const about = el("div", { className: "about" }, cell.name, cell.model, cell.stats, cell.lacks);
  cell.node = el("article", { className: "answer" }, about, cell.text, more, cell.fault, cell.bar);
  views.get(turn).set(key, cell);
  unfold(cell.node, false);
  heights.observe(cell.text);
  drawText(turn, key);
  refresh(turn, key);
  return cell.node;
}

// ---- long answers, which fold on a narrow screen (page.css)

const LONG = 15;  // lines
const heights = new ResizeObserver(entries => {
  for (const { target } of entries) {
    const isLong = target.scrollHeight > LONG * parseFloat(getComputedStyle(target).lineHeight);
    target.parentElement.classList.toggle("long", isLong);
  }
});

function unfold(node, open) {
  const more = node.querySelector(".more");
  node.classList.toggle("open", open);
  more.textContent = open ? "Show less" : "Show all";
  more.setAttribute("aria-expanded", String(open));
}

// ---- one answer

function redraw(turn, key) {
  if (!views.get(turn)?.has(key)) return;
  drawText(turn, key);
  refresh(turn, key);
}

function drawText(turn, key) {
  const answer = turn.answers[key], { text } = views.get(turn).get(key);
  if (answer?.editing) {
    const box = el("textarea", { value: answer.draft ?? answer.text, ariaLabel: `Answer of ${answer.by}`, rows: 2,
      oninput: () => { answer.draft = box.value; fit(box); }, onkeydown: event => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) settle(turn, key, box.value);
        if (event.key !== "Escape") return;
        event.stopPropagation();
        settle(turn, key);
      } });
    text.replaceChildren(box);
    requestAnimationFrame(() => fit(box));
    return box.focus();
  }
  text.setAttribute("aria-live", "polite");
  const parts = answer?.pieces.length ? answer.pieces : answer?.text ? [[answer.text, []]] : [];
  text.replaceChildren(...parts.map(drawPiece));
  firstStop(text);
}

/** As high as its text, also where a browser does not know field-sizing. */
function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function drawNames(cell, answer, by) {
  cell.node.setAttribute("aria-label", `Answer of ${by}`);
  cell.name.textContent = by;
  cell.model.textContent = answer ? labelOf(answer.of, by) : "";
  cell.model.title = answer ? details(answer.of) : "";
}

/** Bring all but the text up to date, so that what reads the page aloud hears an answer once. */
function refresh(turn, key) {
  const answer = turn.answers[key], cell = views.get(turn)?.get(key);
  if (!cell) return;
  const by = answer?.by ?? columnOf(key)?.title ?? "", isWriting = answer?.state === "writing";
  cell.node.classList.toggle("kept", Boolean(answer) && turn.kept === key);
  drawNames(cell, answer, by);
  cell.stats.textContent = answer ? statsOf(answer) : "not asked";
  cell.lacks.textContent = answer && !isWriting ? tintless(answer) : "";
  cell.fault.textContent = answer?.why ?? "";
  cell.text.setAttribute("aria-busy", String(isWriting));
  const focused = cell.bar.contains(document.activeElement) ? document.activeElement.dataset.does : null;
  cell.bar.replaceChildren(...buttons(turn, key, answer, by));
  if (focused !== null) (cell.bar.querySelector(`[data-does="${focused}"]`) ?? cell.bar.firstElementChild)?.focus();
  drawTint();
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
  return parts.join(" · ");
}

function buttons(turn, key, answer, by) {
  const button = (does, name, work, more = {}) =>
    el("button", { type: "button", "data-does": does, ariaLabel: `${name}: answer of ${by}`, onclick: work, ...more }, name);
  const asks = name => columnOf(key) ? [button("again", name, () => again(turn, key))] : [];
  if (!answer) return asks("Answer");
  if (answer.state === "writing") return [button("again", "Stop", () => answer.control?.abort())];
  if (answer.editing) return [
    button("save", "Save", () => settle(turn, key, views.get(turn).get(key).text.firstElementChild.value)),
    button("edit", "Cancel", () => settle(turn, key))];
  const edit = button("edit", "Edit", () => { answer.editing = true; redraw(turn, key); });
  if (answer.state === "failed") return [...asks("Retry"), ...(answer.text ? [edit] : [])];
  const kept = turn.kept === key;
  const keep = button("keep", kept ? "Kept" : "Keep", () => {
    turn.kept = kept ? null : key;
    for (const other of views.get(turn).keys()) refresh(turn, other);
    say(turn.kept ? `All columns go on from the answer of ${by}.` : "Each column goes on from its own answer.");
    save();
  }, { ariaPressed: String(kept), title: "All columns go on from this answer; it is in the file of kept answers" });
  return [...(usable(answer) ? [keep] : []), ...asks("Regenerate"), edit];
}

/** End the editing of an answer, with a new text or as it was. */
function settle(turn, key, text) {
  const answer = turn.answers[key];
  answer.editing = false;
  answer.draft = undefined;
  if (text !== undefined && text !== answer.text) {
    Object.assign(answer, { text, pieces: [], edited: true, state: "done", why: "", gone: undefined });
    save();
  }
  redraw(turn, key);
  views.get(turn).get(key).bar.querySelector("[data-does=edit]")?.focus();
}

/** Stop stands in the place of Send while answers are written. */
function busy() {
  const now = preparing > 0 || writing().length > 0, { activeElement } = document;
  $("stop").hidden = !now;
  $("send").disabled = now;
  $("retry").hidden = now || sum(failures().map(([, failed]) => ({ count: failed.length })), "count") < 2;
  if (activeElement === (now ? $("send") : $("stop"))) $("question").focus();
}
