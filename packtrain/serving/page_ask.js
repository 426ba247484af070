// ---- asking

function requestOf(column, messages, seed) {
  const body = { messages, stream: true, stream_options: { include_usage: true }, reasoning_format: "none", logprobs: true, top_logprobs: 5, seed };
  if (column.model) body.model = column.model;
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.schema.trim())
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  const count = servers.get(column.address)?.adapters.length;
  if (count) body.lora = Array.from({ length: count }, (_, id) => ({ id, scale: column.scales[id] ?? 0 }));
  return JSON.stringify(body);
}

const newSeed = () => settings.seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(settings.seed);

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** Have a column answer a turn; what it writes is shown as it comes. */
async function write(turn, column, seed) {
  const one = talk(), key = keyOf(column), answer = { text: "", pieces: [], by: column.title, of: modelOf(column), state: "writing",
    why: "", seed, tokens: 0, likely: 0, control: new AbortController() };
  turn.answers[key]?.control?.abort();
  turn.answers[key] = answer;
  if (turn.kept === key) turn.kept = null;
  const view = () => talk() === one && turn.answers[key] === answer && refresh(turn, key);
  redraw(turn, key);
  const messages = [...before(one.turns.slice(0, one.turns.indexOf(turn)), key), { role: "user", content: turn.question }];
  try {
    const options = { method: "POST", body: requestOf(column, messages, seed), signal: answer.control.signal };
    const response = await call(column.address, "/v1/chat/completions", options);
    answer.began = performance.now();
    try { await take(turn, key, answer, response); } catch (fault) {
      if (fault instanceof Refusal || fault.name === "AbortError") throw fault;
      throw new Gone("The server went away while it answered; the text so far is kept.");
    }
    answer.state = "done";
  } catch (fault) {
    answer.state = fault.name === "AbortError" ? "stopped" : "failed";
    answer.why = answer.state === "failed" ? fault.message : "";
    if (fault instanceof Gone) {
      answer.gone = fault.message;
      answer.why += " Try again when it is back.";
      setLink(column.address, false);
    }
  }
  answer.control = undefined;
  showAdded();
  view();
  busy();
  save();
}

async function take(turn, key, answer, response) {
  for await (const event of events(response)) {
    if (event.error) throw event.error.code === 503 ? new Gone("The server was stopped while it answered; the text so far is kept.")
      : new Refusal(event.error.code ?? 500, event.error);
    const choice = event.choices?.[0];
    if (choice?.delta?.content) add(turn, key, answer, choice.delta.content, (choice.logprobs?.content ?? []).filter(isSure));
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.speed = event.timings?.predicted_per_second ?? answer.speed;
    answer.count = event.usage?.completion_tokens ?? answer.count;
  }
  if (!answer.finish) throw new Gone();
  answer.speed ??= 1000 * answer.tokens / (performance.now() - answer.began);
}

function add(turn, key, answer, text, tokens) {
  answer.pieces.push(...pieces(text, tokens, answer.text === ""));
  answer.text += text;
  answer.tokens += tokens.length;
  answer.likely += tokens.reduce((sum, token) => sum + token.logprob, 0);
  unshown.set(answer, [turn, key]);
  frame ??= requestAnimationFrame(showAdded);
}

const unshown = new Map();  // answers with text that the page does not show yet, and where they are
let frame = null;

/** Show what was added, once in a frame: a layout for each token would leave no time for keys and clicks. */
function showAdded() {
  frame = null;
  const low = innerHeight + scrollY > document.documentElement.scrollHeight - 60;
  for (const [answer, [turn, key]] of unshown) {
    const cell = views.get(turn)?.get(key);
    if (!cell?.text.isConnected || turn.answers[key] !== answer || answer.editing) continue;
    cell.text.append(...answer.pieces.slice(cell.text.childElementCount).map(drawPiece));
    firstStop(cell.text);
  }
  unshown.clear();
  if (low) scrollTo(0, document.documentElement.scrollHeight);
}

let preparing = 0;  // questions for which the servers are read, before any answer is written

/** Do work that has answers written, after the servers have said what they have now. */
async function asking(work) {
  if (!checked()) return;
  preparing++;
  busy();
  try { await rereadAll(); } finally { preparing--; }
  await work();
  busy();
}

const ask = question => asking(() => {
  const one = talk(), turn = { question, answers: {}, kept: null };
  one.system = settings.system;
  one.turns.push(turn);
  forgetUndo();
  save();
  if (one.turns.length === 1) drawTurns();
  else $("turns").append(drawTurn(turn, one.turns.length - 1));
  drawEdits();
  scrollTo(0, document.documentElement.scrollHeight);
  const seed = newSeed();
  return Promise.all(columns.map(column => write(turn, column, seed)));
});

/** Have one column answer again; an answer that is replaced can be taken back. */
const again = (turn, key) => asking(() => {
  const column = columnOf(key), old = turn.answers[key], wasKept = turn.kept === key;
  if (!column) return;
  const written = write(turn, column, newSeed());
  if (usable(old)) offerUndo(`${column.title} answers again.`, "Undo regenerate", () => {
    turn.answers[key]?.control?.abort();
    turn.answers[key] = old;
    if (wasKept) turn.kept = key;
    redraw(turn, key);
    save();
  });
  return written;
});

/** Answers of the conversation that failed, by turn: later ones go on from earlier ones. */
function failures() {
  return talk().turns.map(turn => [turn, columns.filter(column => turn.answers[keyOf(column)]?.state === "failed")])
    .filter(([, failed]) => failed.length);
}

$("retry").addEventListener("click", () => asking(async () => {
  $("question").focus();
  for (const [turn, failed] of failures()) {
    const seed = newSeed();
    await Promise.all(failed.map(column => write(turn, column, seed)));
  }
}));

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || $("send").disabled || !columns.length) return;
  say();
  ask(question);
  if (checked()) $("question").value = "";
});
$("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});

function writing() {
  return talks.flatMap(answersOf).filter(answer => answer.control);
}

function stopAll() {
  for (const answer of writing()) answer.control?.abort();
}

$("stop").addEventListener("click", () => { stopAll(); $("question").focus(); });
addEventListener("pagehide", () => { if (writing().length) save(); });
addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("other").open) return;
  if (!$("tip").hidden) hideTip();
  else stopAll();
});
