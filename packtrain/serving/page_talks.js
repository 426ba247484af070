// ---- conversations

let talks = stored("talks", []).filter(one => Array.isArray(one.turns));  // system message and turns: question, answers
if (!talks.length) talks.push({ system: "", turns: [] });
let current = Math.min(stored("current", 0), talks.length - 1);
const talk = () => talks[current];
const usable = answer => answer && ["done", "stopped"].includes(answer.state) && answer.text.trim() !== "";
const keptOf = turn => turn.answers[turn.kept];

function save() {
  const answers = turn => Object.fromEntries(Object.entries(turn.answers).map(([id, answer]) =>
    [id, { ...answer, pieces: undefined, control: undefined, editing: undefined,
      state: answer.state === "writing" ? "stopped" : answer.state }]));
  store("talks", talks.map(({ system, turns }) => ({ system, turns: turns.map(turn => ({ ...turn, answers: answers(turn) })) })));
  store("current", current);
  drawChoices();
}

/** Messages that a column has read and written: earlier turns go on from the answer that was kept. */
function messagesOf({ system, turns }, answerOf) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const [at, turn] of turns.entries()) {
    const answer = answerOf(turn, at);
    if (usable(answer)) messages.push({ role: "user", content: turn.question }, { role: "assistant", content: answer.text });
  }
  return messages;
}

const before = (turns, id) => messagesOf({ system: talk().system, turns }, turn => keptOf(turn) ?? turn.answers[id]);

/** The messages of a conversation for training, of a column or ("kept") of the answers that were kept; or null. */
function sample({ system, turns }, id) {
  if (id === "kept") {
    const end = turns.findIndex(turn => !usable(keptOf(turn)));
    turns = end < 0 ? turns : turns.slice(0, end);
  }
  const last = turns.length - 1;
  const found = messagesOf({ system, turns }, (turn, at) =>
    id === "kept" || at < last ? keptOf(turn) ?? turn.answers[id] : turn.answers[id] ?? keptOf(turn));
  return found.some(message => message.role === "assistant") ? found : null;
}

const samples = id => talks.map(one => sample(one, id)).filter(Boolean);

/** One line for each conversation, as `packtrain finetune --data` reads them. */
function jsonLines(id) {
  const line = messages => JSON.stringify({ messages: messages.map(({ role, content }) =>
    ({ role, content: content.toWellFormed?.() ?? content })) });
  const breaks = /[\u0085\u2028\u2029]/g;  // some readers end lines there
  return samples(id).map(messages => line(messages).replace(breaks, c => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`) + "\n").join("");
}

function drawChoices() {
  const option = (id, name) => el("option", { value: id }, `${name} (${samples(id).length})`);
  const chosen = $("which").value || "kept";
  $("which").replaceChildren(option("kept", "kept answers"), ...columns.map(column => option(column.id, column.title)));
  $("which").value = chosen;
  if (!$("which").value) $("which").value = "kept";
  $("talk").replaceChildren(...talks.map(({ turns }, at) => el("option", { value: at, selected: at === current },
    `${at + 1}: ${turns[0]?.question.slice(0, 40) ?? "new"}`)));
  $("drop").disabled = talks.length === 1 && !talk().turns.length;
}

$("download").addEventListener("click", () => {
  const id = $("which").value, text = jsonLines(id);
  if (!text) return say(id === "kept" ? "No answer is kept yet: press Keep below one, or choose a column." : "This column has no answer yet.");
  const name = columns.find(column => column.id === id)?.title ?? "kept";
  const address = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  el("a", { href: address, download: `chats-${name.replace(/[^\w.-]+/g, "-")}.jsonl` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  say(`${plural(samples(id).length, "conversation")} written; packtrain finetune --data takes the file.`);
});

function show(at) {
  current = at;
  save();
  drawTurns();
}

$("talk").addEventListener("change", event => show(Number(event.target.value)));
$("fresh").addEventListener("click", () => {
  const empty = talks.findIndex(one => !one.turns.length);
  if (empty < 0) talks.push({ system: "", turns: [] });
  show(empty < 0 ? talks.length - 1 : empty);
  $("question").focus();
});
$("drop").addEventListener("click", () => {
  if (talk().turns.length && !confirm("Delete this conversation?")) return;
  stopAll();
  talks.splice(current, 1);
  if (!talks.length) talks.push({ system: "", turns: [] });
  show(Math.min(current, talks.length - 1));
});
