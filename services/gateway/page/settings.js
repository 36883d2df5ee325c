// The settings: their values, the error message for an invalid one, and storing them over a reload. An empty field means
// its default, the value in index.html.

import { keep, keptObject } from "/page/storage.js";

const NUMBERS = ["temperature", "penalty", "tokens"];
const ALL = ["system", ...NUMBERS];
const element = (id) => document.getElementById(id);

// Returns { system, temperature, penalty, tokens }; shows an error and returns null if one is invalid. tokens: null if the
// field is empty.
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

// Restores stored settings, and stores changes.
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
