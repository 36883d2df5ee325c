// Requests to the server: its key, if it requires one, and streams of events.

import { keep, kept } from "/page/storage.js";

let key = kept("key");
let asking = null;

export async function ask(path, options = {}) {
  for (;;) {
    const shown = key;
    const headers = { ...options.headers, ...(shown ? { authorization: `Bearer ${shown}` } : {}) };
    const response = await fetch(path, { ...options, headers }).catch(gone);
    if (response.status !== 401) return response;
    if (shown === key) await (asking ??= askForKey(shown !== "").finally(() => (asking = null)));
  }
}

function askForKey(wrong) {
  const dialog = document.getElementById("key-dialog");
  const field = document.getElementById("key");
  document.getElementById("key-wrong").hidden = !wrong;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = field.value.trim();
      keep("key", key);
      dialog.close();
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

// Yields the parsed data of each event, until "[DONE]".
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(gone);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Returns the error of a failed response, with its code.
export async function failure(response) {
  try {
    const { message, code } = (await response.json()).error;
    return Object.assign(new Error(message), { code });
  } catch {
    return new Error(`the server answered ${response.status}`);
  }
}

// Replaces the error of a failed fetch, whose text differs between browsers.
function gone(error) {
  throw error.name === "AbortError" ? error : new Error("the server does not answer");
}
