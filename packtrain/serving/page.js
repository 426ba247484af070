// ---- settings

const NONE = { system: "", temperature: "", top_k: "", top_p: "", min_p: "", seed: "", max_tokens: "512", schema: "", tint: false };
const settings = { ...NONE, ...stored("settings", {}) };

function showDefaults(defaults) {
  for (const name of ["temperature", "top_k", "top_p", "min_p"])
    if (typeof defaults[name] === "number") $("settings").elements[name].placeholder = Number(defaults[name].toPrecision(6));
}

/** Whether all settings are what they may be; shows the first that is not. */
function checked() {
  const form = $("settings");
  if (form.checkValidity()) return true;
  openSettings(true);
  form.reportValidity();
  return false;
}

function openTools(open) {
  document.body.classList.toggle("tools-open", open);
  $("tools").setAttribute("aria-expanded", String(open));
}

function openSettings(open) {
  if (open) openTools(true);  // on a narrow screen they fold together
  $("settings").hidden = !open;
  $("adjust").setAttribute("aria-expanded", String(open));
}

function checkSchema() {
  const box = $("settings").elements.schema;
  let fault = "";
  try { if (box.value.trim()) JSON.parse(box.value); } catch (error) { fault = `This is not JSON: ${error.message}`; }
  box.setCustomValidity(fault);
}

for (const field of $("settings").elements) field.value = settings[field.name];
checkSchema();
$("settings").addEventListener("submit", event => event.preventDefault());
$("settings").addEventListener("input", ({ target }) => {
  checkSchema();
  settings[target.name] = target.value;
  store("settings", settings);
});
$("adjust").addEventListener("click", () => openSettings($("settings").hidden));
$("tint").addEventListener("change", () => {
  settings.tint = $("tint").checked;
  store("settings", settings);
  drawTint();
});
$("tools").addEventListener("click", () => openTools(!document.body.matches(".tools-open")));

say();
drawChoices();
reread(OWN).catch(fault => { say(fault.message); drawColumns(); drawTurns(); }).finally(watch);
$("question").focus();
