// ---- tokens

const pieceOf = new WeakMap();  // of a span

/** Text as pieces [text, tokens], each with the token that wrote it, or with several, where one character takes several. */
function pieces(text, tokens, first) {
  const found = [];
  let at = 0, group = [];
  for (const token of tokens) {
    group.push(token);
    const whole = textOf(group);
    const fits = [whole, first && at === 0 ? whole.trimStart() : ""].find(one => one && text.startsWith(one, at));
    if (!fits) continue;
    found.push([fits, group.map(told)]);
    at += fits.length;
    group = [];
  }
  if (at < text.length) found.push([text.slice(at), group.map(told)]);
  return found;
}

const isSure = token => Number.isFinite(token.logprob);

/** A token as it is stored with an answer: what it shows, its logprob, and those of the likeliest others in turn. */
function told(token) {
  const same = other => token.id !== undefined && other.id !== undefined ? token.id === other.id : token.token === other.token;
  const both = one => [visible(one), Number(one.logprob.toFixed(3))];
  return [token, ...(token.top_logprobs ?? []).filter(other => isSure(other) && !same(other))].flatMap(both);
}

function textOf(tokens) {
  if (tokens.length === 1 || !tokens.every(token => Array.isArray(token.bytes))) return tokens.map(token => token.token).join("");
  return new TextDecoder().decode(new Uint8Array(tokens.flatMap(token => token.bytes)));
}

function drawPiece(piece) {
  const [text, tokens] = piece, span = el("span", {}, text);
  if (!tokens.length) return span;
  pieceOf.set(span, piece);
  span.tabIndex = -1;
  const likely = tokens.reduce((total, [, logprob]) => total + logprob, 0);
  span.style.setProperty("--doubt", `${(70 * (1 - Math.exp(likely))).toFixed(0)}%`);
  return span;
}

const hasTint = answer => answer.pieces.some(([, tokens]) => tokens.length);

/** Why an answer cannot be tinted; "" if it can be, or has no text. */
function tintless(answer) {
  if (!answer.text || hasTint(answer)) return "";
  if (answer.edited) return "no probabilities: edited";
  if (answer.dropped) return "no probabilities: this browser's store is full";
  return answer.of ? "no probabilities: the server sent none" : "no probabilities: the page did not store them then";
}

/** Tint is off where no answer of the conversation has probabilities; its title says why. */
function drawTint() {
  const answers = answersOf(talk()).filter(answer => answer.text), can = !answers.length || answers.some(hasTint);
  const why = can ? "" : [...new Set(answers.map(tintless))].join("; ");
  $("tint").disabled = !can;
  $("tint").checked = can && settings.tint;
  $("tint").parentElement.title = why;
  $("tint-name").textContent = can ? "Tint by probability" : "No probabilities to tint";
  document.body.classList.toggle("tint", $("tint").checked);
}

/** A text is one stop of the Tab key, at the token that was visited last. */
function firstStop(text) {
  if (!text.querySelector("[tabindex='0']")) text.querySelector("[tabindex]")?.setAttribute("tabindex", "0");
}

function visible(token) {
  if (token.token.includes("\ufffd") && Array.isArray(token.bytes))
    return token.bytes.map(byte => byte.toString(16).padStart(2, "0")).join(" ");
  return token.token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "(no text)";
}

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(logprob > Math.log(0.0995) ? 1 : 2)} %`;

function showTip(span) {
  const piece = pieceOf.get(span), tip = $("tip");
  if (!piece) return hideTip();
  const row = ([name, logprob], chosen) => {
    const share = el("i");
    share.style.width = `${(100 * Math.exp(logprob)).toFixed(1)}%`;
    return el("tr", { className: chosen ? "chosen" : "" }, el("th", { scope: "row" }, name),
      el("td", {}, percent(logprob)), el("td", { className: "share" }, share), el("td", {}, chosen ? "chosen" : ""));
  };
  const [, tokens] = piece;
  const rows = tokens.flatMap(token => {
    const pairs = token.flatMap((name, at) => at % 2 || (at && tokens.length > 1) ? [] : [[name, token[at + 1]]]);
    const [chosen] = pairs;
    return pairs.sort((a, b) => b[1] - a[1]).map(pair => row(pair, pair === chosen));
  });
  tip.replaceChildren(el("table", {}, ...rows));
  tip.hidden = false;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  span.setAttribute("aria-describedby", "tip");
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const below = at.bottom + 6 + box.height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(at.left, document.documentElement.clientWidth - box.width - 4))}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - box.height - 6)}px`;
}

function hideTip() { $("tip").hidden = true; }

$("turns").addEventListener("pointerover", event => event.target.matches(".text span") ? showTip(event.target) : hideTip());
$("turns").addEventListener("pointerleave", hideTip);
$("turns").addEventListener("focusin", ({ target }) => {
  if (!target.matches(".text span")) return;
  unfold(target.closest(".answer"), true);
  showTip(target);
});
$("turns").addEventListener("focusout", hideTip);
addEventListener("scroll", () => { if (!document.activeElement.matches(".text span")) hideTip(); }, { passive: true });
$("turns").addEventListener("keydown", event => {
  const span = event.target;
  if (!span.matches(".text span")) return;
  const stops = [...span.parentElement.querySelectorAll("[tabindex]")], at = stops.indexOf(span);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 }[event.key];
  if (to === undefined || !stops[to]) return;
  event.preventDefault();
  span.tabIndex = -1;
  stops[to].tabIndex = 0;
  stops[to].focus();
});
