// ---- conversations

const answersOf = one => one.turns.flatMap(turn => Object.values(turn.answers));
const TALK = "packtrain.talk.";  // each conversation has a key of its own: a tab writes only over what it has read
const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
const newTalk = () => ({ id: newId(), begun: Date.now(), system: "", turns: [] });
const texts = new Map();  // by id: the conversation's text in the store, as last read or written here
const talks = readTalks();  // system message and turns: question, answers
let current = Math.max(talks.findIndex(({ id }) => id === (stored("current", null, sessionStorage) ?? stored("current", null))), 0);
const talk = () => talks[current];

/** The conversation of a text in the store; null if it is none. */
function parsed(text) {
  let one = null;
  try { one = JSON.parse(text); } catch { return null; }
  if (!Array.isArray(one?.turns)) return null;
  for (const answer of answersOf(one)) answer.pieces ??= [];
  return one;
}

const storedText = id => { try { return localStorage.getItem(TALK + id); } catch { return null; } };

function readTalks() {
  const found = [], old = stored("talks", []);  // before, one text had them all
  try {
    for (const key of Object.keys(localStorage).filter(name => name.startsWith(TALK))) {
      const text = localStorage.getItem(key), one = parsed(text);
      if (one) found.push(one), texts.set(one.id, text);
    }
    localStorage.removeItem("packtrain.talks");
  } catch { /* a browser that stores nothing */ }
  found.push(...old.map((one, at) => parsed(JSON.stringify({ ...newTalk(), begun: at, ...one }))).filter(Boolean));
  return found.length ? found.sort((one, other) => one.begun - other.begun) : [newTalk()];
}
const usable = answer => answer && ["done", "stopped"].includes(answer.state) && answer.text.trim() !== "";
const keptOf = turn => turn.answers[turn.kept];

/** Store all conversations. Where the browser's store is full, those that are not shown lose their probabilities first. */
function save() {
  const shown = talk(), rest = [...talks.filter(one => one !== shown), shown];
  for (const one of [...talks]) while (!put(one)) {
    const last = rest.shift();
    if (!last) { say("This browser keeps no more: download the conversations before you close the page."); break; }
    for (const answer of answersOf(last).filter(one => one.pieces.length && one.state !== "writing"))
      Object.assign(answer, { pieces: [], dropped: true });
    if (last !== one) put(last);
    if (last === shown) drawTurns();
  }
  current = talks.indexOf(shown);
  for (const where of [sessionStorage, localStorage]) store("current", shown.id, where);
  drawChoices();
}

const valueOf = ({ id, begun, system, turns }) => ({ id, begun, system, turns: turns.map(turn => ({ ...turn,
  answers: Object.fromEntries(Object.entries(turn.answers).map(([key, answer]) =>
    [key, { ...answer, control: undefined, editing: undefined, draft: undefined,
      state: answer.state === "writing" ? "stopped" : answer.state }])) })) });
const isChanged = one => JSON.stringify(valueOf(one)) !== texts.get(one.id);

/** Store a conversation that was changed here; one that another tab has changed, too, stays beside it. Whether there was room. */
function put(one) {
  if (!isChanged(one) || (!one.turns.length && !texts.has(one.id))) return true;
  const there = storedText(one.id), other = there !== null && there !== texts.get(one.id) ? parsed(there) : null;
  if (other) {
    texts.set(other.id, there);
    talks.splice(talks.indexOf(one), 0, other);
    one.id = newId();
    say("Another tab went on with this conversation: both are in the list.");
  }
  const value = valueOf(one), isStored = store(`talk.${one.id}`, value);
  if (isStored) texts.set(one.id, JSON.stringify(value));
  return isStored;
}

// what another tab has stored
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(TALK)) return;
  const id = key.slice(TALK.length), mine = talks.find(one => one.id === id), shown = talk(), other = parsed(newValue);
  if (mine && (isChanged(mine) || preparing || answersOf(mine).some(answer => answer.control || answer.editing))) return;
  if (other) {
    texts.set(id, newValue);
    if (mine) Object.assign(mine, other);
    else talks.push(other);
    if (mine === shown) drawTurns();
  } else if (mine && mine !== shown) talks.splice(talks.indexOf(mine), 1);
  current = talks.indexOf(shown);
  drawChoices();
});

const before = (turns, key) => {
  const messages = talk().system.trim() ? [{ role: "system", content: talk().system }] : [];
  for (const turn of turns) {
    const answer = keptOf(turn) ?? turn.answers[key];
    if (usable(answer)) messages.push({ role: "user", content: turn.question }, { role: "assistant", content: answer.text });
  }
  return messages;
};

/** The conversations to learn the answers of a column from, or ("kept") the answers that were kept.
 *
 * Each has messages, and the models of its answers. Answers of others that stand before one are its context: weight 0.
 * Where the conversation went on from another answer, the column's own ends a line of its own.
 */
function samples(key, list = talks) {
  return list.flatMap(({ system, turns }) => {
    const lines = [], history = [];
    let length = 0;
    for (const [at, turn] of turns.entries()) {
      const answer = turn.answers[key === "kept" ? turn.kept : key];
      const nextKept = turns.slice(at).find(keptOf)?.kept;
      const basis = keptOf(turn) ?? turn.answers[key === "kept" ? nextKept : key];
      if (usable(answer) && answer !== basis) lines.push([...history.map(one => ({ ...one, isLearnt: false })), { turn, answer, isLearnt: true }]);
      if (!usable(basis)) continue;
      history.push({ turn, answer: basis, isLearnt: basis === answer });
      if (basis === answer) length = history.length;
    }
    if (length) lines.push(history.slice(0, length));
    return lines.map(steps => sample(system, steps));
  });
}

function sample(system, steps) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { turn, answer, isLearnt } of steps)
    messages.push({ role: "user", content: turn.question },
      { role: "assistant", content: answer.text, ...(isLearnt ? {} : { weight: 0 }) });
  const models = steps.map(({ answer }) => labelOf(answer.of) + (answer.edited ? ", edited" : ""));
  return { messages, models, count: steps.filter(step => step.isLearnt).length, context: steps.filter(step => !step.isLearnt).length };
}

const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);

/** One line for each conversation, as `packtrain finetune --data` reads them. */
function jsonLines(list) {
  const whole = text => text.toWellFormed?.() ?? text;
  const line = ({ messages, models }) =>
    JSON.stringify({ messages: messages.map(message => ({ ...message, content: whole(message.content) })), models });
  const breaks = /[\u0085\u2028\u2029]/g;  // some readers end lines there
  return list.map(one => line(one).replace(breaks, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`) + "\n").join("");
}

/** Whose answers can be downloaded: each column's, and those of models that are not compared now. */
function sources() {
  const found = new Map(columns.map(column => [keyOf(column), { title: column.title, model: modelOf(column) }]));
  for (const [key, answer] of talks.flatMap(one => one.turns.flatMap(turn => Object.entries(turn.answers))))
    if (!found.has(key) && usable(answer)) found.set(key, { title: answer.by, model: answer.of });
  return found;
}

function drawChoices() {
  const option = (key, name) => el("option", { value: key }, `${name} (${sum(samples(key), "count")})`);
  const chosen = $("which").value || "kept";
  $("which").replaceChildren(option("kept", "kept answers"),
    ...[...sources()].map(([key, { title, model }]) => option(key, `${title} ${labelOf(model, title)}`)));
  $("which").value = chosen;
  if (!$("which").value) $("which").value = "kept";
  $("talk").replaceChildren(...talks.map(({ turns }, at) => el("option", { value: at, selected: at === current },
    `${at + 1}: ${turns[0]?.question.slice(0, 40) ?? "new"}`)));
  $("drop").disabled = talks.length === 1 && !talk().turns.length;
}

$("download").addEventListener("click", () => {
  const key = $("which").value, list = samples(key);
  if (!list.length) return say(key === "kept" ? "No answer is kept yet: press Keep below one, or choose a column." : "This column has no answer yet.");
  const { title, model } = sources().get(key) ?? { title: "kept" };
  const name = `chats-${[title, model && labelOf(model, title)].filter(Boolean).join(" ").replace(/[^\w.-]+/g, "-")}.jsonl`;
  const address = URL.createObjectURL(new Blob([jsonLines(list)], { type: "application/jsonl" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  const context = sum(list, "context");
  say(`${plural(sum(list, "count"), "answer")} written, in ${plural(list.length, "conversation")}`
    + `${context ? `; ${plural(context, "other answer")} as context that is not learned` : ""}. packtrain finetune --data takes the file.`);
});

function show(at) {
  current = at;
  save();
  drawTurns();
}

$("talk").addEventListener("change", event => show(Number(event.target.value)));
$("fresh").addEventListener("click", () => {
  const empty = talks.findIndex(one => !one.turns.length);
  if (empty < 0) talks.push(newTalk());
  show(empty < 0 ? talks.length - 1 : empty);
  $("question").focus();
});
$("drop").addEventListener("click", () => {
  const one = talk(), at = current;
  forgetUndo();
  for (const answer of answersOf(one)) answer.control?.abort();
  talks.splice(at, 1);
  texts.delete(one.id);
  try { localStorage.removeItem(TALK + one.id); } catch { /* it was not stored */ }
  const stand = talks.length ? null : newTalk();
  if (stand) talks.push(stand);
  show(Math.min(at, talks.length - 1));
  if (!one.turns.length) return;
  offerUndo("The conversation is deleted.", "Undo delete", () => {
    if (stand && !stand.turns.length) talks.splice(talks.indexOf(stand), 1);
    talks.splice(at, 0, one);
    show(talks.indexOf(one));
  });
  $("undo").focus();
});

// ---- undo

let undo = null;

/** Say what was done, with a button that takes it back. */
function offerUndo(text, name, restore) {
  say(text);
  undo = restore;
  $("undo").textContent = name;
  $("undo").hidden = false;
}

function forgetUndo() {
  undo = null;
  $("undo").hidden = true;
}

$("undo").addEventListener("click", () => {
  const restore = undo;
  forgetUndo();
  say();
  restore();
  $("question").focus();
});
