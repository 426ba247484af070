// ---- tokens

const pieceOf = new WeakMap();  // of a span

/** Text as spans' pieces, each with the token that wrote it, or with several, where one character takes several. */
function pieces(text, tokens, first) {
  const found = [];
  let at = 0, group = [];
  for (const token of tokens) {
    group.push(token);
    const whole = textOf(group);
    const fits = [whole, first && at === 0 ? whole.trimStart() : ""].find(one => one && text.startsWith(one, at));
    if (!fits) continue;
    found.push({ text: fits, tokens: group });
    at += fits.length;
    group = [];
  }
  if (at < text.length) found.push({ text: text.slice(at), tokens: group });
  return found;
}

function textOf(tokens) {
  if (tokens.length === 1 || !tokens.every(token => Array.isArray(token.bytes))) return tokens.map(token => token.token).join("");
  return new TextDecoder().decode(new Uint8Array(tokens.flatMap(token => token.bytes)));
}

function drawPiece(piece) {
  const span = el("span", {}, piece.text);
  if (!piece.tokens.length) return span;
  pieceOf.set(span, piece);
  span.tabIndex = -1;
  const sum = piece.tokens.reduce((total, token) => total + token.logprob, 0);
  span.style.setProperty("--doubt", `${(70 * (1 - Math.exp(sum))).toFixed(0)}%`);
  return span;
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
  const row = (token, chosen) => {
    const share = el("i");
    share.style.width = `${(100 * Math.exp(token.logprob)).toFixed(1)}%`;
    return el("tr", { className: chosen ? "chosen" : "" }, el("th", { scope: "row" }, visible(token)),
      el("td", {}, percent(token.logprob)), el("td", { className: "share" }, share), el("td", {}, chosen ? "chosen" : ""));
  };
  const same = (a, b) => a.id !== undefined && b.id !== undefined ? a.id === b.id : a.token === b.token;
  const rows = piece.tokens.flatMap(token => {
    const others = piece.tokens.length > 1 ? [] : (token.top_logprobs ?? []).filter(top => !same(top, token));
    return [token, ...others].sort((a, b) => b.logprob - a.logprob).map(one => row(one, one === token));
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
$("turns").addEventListener("focusin", event => { if (event.target.matches(".text span")) showTip(event.target); });
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
