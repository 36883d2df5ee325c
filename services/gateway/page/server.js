// Speaking with the server: the key, when it asks for one, and streams of events.

const KEY = "neuronpipe-key";
let asking = null;

export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await (asking ??= askForKey(key !== null).finally(() => (asking = null)));
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
      sessionStorage.setItem(KEY, field.value.trim());
      dialog.close();
      resolve();
    };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

// The data of each event, parsed; "[DONE]" ends it.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
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

export async function problem(response) {
  try {
    const { message, code } = (await response.json()).error;
    return code === "context_length_exceeded" ? `${message}, or start anew (in the settings)` : message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
