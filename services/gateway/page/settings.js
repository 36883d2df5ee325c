// The settings: what they are, what is wrong with one, and keeping them over a reload. An empty field means its default,
// which is what it had when the page was written.

import { keep, keptObject } from "/page/storage.js";

const NUMBERS = ["temperature", "penalty", "tokens"];
const ALL = ["system", ...NUMBERS];
const element = (id) => document.getElementById(id);

// { system, temperature, penalty, tokens }; null when one is wrong, which the person is shown. tokens: null unless a
// number was typed.
export function settings() {
  const wrong = NUMBERS.map(element).find(isWrong);
  if (wrong) {
    show(wrong);
    return null;
  }
  const numbers = NUMBERS.map((id) => {
    const text = element(id).value || element(id).defaultValue;
    return [id, text ? Number(text) : null];
  });
  return { system: element("system").value.trim(), ...Object.fromEntries(numbers) };
}

// Puts back what was kept, and keeps what changes.
export function keepSettings() {
  const before = keptObject("settings");
  for (const id of ALL) {
    if (typeof before?.[id] === "string") element(id).value = before[id];
    element(id).addEventListener("input", () => {
      forgive();
      keep("settings", JSON.stringify(Object.fromEntries(ALL.map((one) => [one, element(one).value]))));
    });
  }
}

const isWhole = (field) => field.step === "1";

function isWrong(field) {
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = field.validity;
  return badInput || rangeUnderflow || rangeOverflow || (isWhole(field) && stepMismatch);
}

function show(field) {
  forgive();
  const kind = isWhole(field) ? "a whole number" : "a number";
  const range = `${kind} from ${field.min} to ${Number(field.max).toLocaleString("en")}`;
  element("settings").open = true;
  element("wrong").textContent = `${field.labels[0].textContent} must be ${range}, or empty for ${field.placeholder}.`;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "wrong");
  field.focus();
  field.select();
}

function forgive() {
  element("wrong").textContent = "";
  for (const field of NUMBERS.map(element)) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
}
