// System prompts that the person keeps: suggestions of the field, stored in the browser until they are forgotten.

import { BROWSER, keep, keptObject } from "/page/storage.js";

const NAME = "system-prompts";
const MAX_PROMPTS = 50;
const MAX_CHARACTERS = 4096; // of one

// Offers the stored prompts in a field, and keeps or forgets its text with a button.
export function offerPrompts(field, suggestions, button) {
  const draw = () => {
    const text = field.value.trim();
    const stored = read();
    suggestions.replaceChildren(...stored.map((one) => new Option(one, one)));
    button.textContent = stored.includes(text) ? "Forget" : "Keep";
    button.disabled = !text || text.length > MAX_CHARACTERS;
  };
  button.addEventListener("click", () => {
    const text = field.value.trim();
    const others = read().filter((one) => one !== text);
    const prompts = button.textContent === "Forget" ? others : [text, ...others].slice(0, MAX_PROMPTS);
    keep(NAME, prompts.length ? JSON.stringify(prompts) : "", BROWSER);
    draw();
  });
  field.addEventListener("input", draw);
  field.addEventListener("focus", draw); // another tab may have changed them
  draw();
}

function read() {
  const stored = keptObject(NAME, BROWSER);
  return Array.isArray(stored) ? stored.filter((one) => typeof one === "string") : [];
}
