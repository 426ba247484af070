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
  const one = talk(), answer = { text: "", pieces: [], by: column.title, scales: [...column.scales], state: "writing", why: "",
    seed, tokens: 0, likely: 0, control: new AbortController() };
  turn.answers[column.id]?.control?.abort();
  turn.answers[column.id] = answer;
  if (turn.kept === column.id) turn.kept = null;
  const view = () => talk() === one && turn.answers[column.id] === answer && refresh(turn, column);
  redraw(turn, column);
  const messages = [...before(one.turns.slice(0, one.turns.indexOf(turn)), column.id), { role: "user", content: turn.question }];
  try {
    const options = { method: "POST", body: requestOf(column, messages, seed), signal: answer.control.signal };
    const response = await call(column.address, "/v1/chat/completions", options);
    answer.began = performance.now();
    try { await take(turn, column, answer, response); } catch (fault) {
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
      watch(column.address);
    }
  }
  answer.control = undefined;
  view();
  busy();
  save();
}

async function take(turn, column, answer, response) {
  for await (const event of events(response)) {
    if (event.error) throw event.error.code === 503 ? new Gone("The server was stopped while it answered; the text so far is kept.")
      : new Refusal(event.error.code ?? 500, event.error);
    const choice = event.choices?.[0];
    if (choice?.delta?.content) add(turn, column, answer, choice.delta.content, choice.logprobs?.content ?? []);
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.speed = event.timings?.predicted_per_second ?? answer.speed;
    answer.count = event.usage?.completion_tokens ?? answer.count;
  }
  if (!answer.finish) throw new Gone();
  answer.speed ??= 1000 * answer.tokens / (performance.now() - answer.began);
}

function add(turn, column, answer, text, tokens) {
  const low = innerHeight + scrollY > document.documentElement.scrollHeight - 60;
  const fresh = pieces(text, tokens, answer.text === "");
  answer.text += text;
  answer.pieces.push(...fresh);
  answer.tokens += tokens.length;
  answer.likely += tokens.reduce((sum, token) => sum + token.logprob, 0);
  const cell = views.get(turn)?.get(column.id);
  if (cell?.text.isConnected && turn.answers[column.id] === answer) {
    cell.text.append(...fresh.map(drawPiece));
    firstStop(cell.text);
  }
  if (low) scrollTo(0, document.documentElement.scrollHeight);
}

async function ask(question) {
  if (!checked()) return;
  const one = talk(), turn = { question, answers: {}, kept: null };
  one.system = settings.system;
  one.turns.push(turn);
  save();
  $("turns").append(drawTurn(turn, one.turns.length - 1));
  drawEdits();
  scrollTo(0, document.documentElement.scrollHeight);
  const seed = newSeed();
  await Promise.all(columns.map(column => write(turn, column, seed)));
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || $("send").disabled || !columns.length) return;
  say("");
  ask(question);
  if (checked()) $("question").value = "";
});
$("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});

function writing() {
  return talks.flatMap(one => one.turns.flatMap(turn => Object.values(turn.answers))).filter(answer => answer.state === "writing");
}

function stopAll() {
  for (const answer of writing()) answer.control?.abort();
}

$("stop").addEventListener("click", () => { stopAll(); $("question").focus(); });
addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("other").open) return;
  if (!$("tip").hidden) hideTip();
  else stopAll();
});
