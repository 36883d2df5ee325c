// The conversation: asking, streaming, stopping. What the run does meanwhile is drawn by live.js.

import { ask, events, problem } from "/page/server.js";
import { look } from "/page/live.js";

const element = (id) => document.getElementById(id);
const conversation = [];
let asking = null;

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const body = document.createElement("pre");
  body.textContent = text;
  const note = document.createElement("small");
  item.append(body, note);
  element("messages").append(item);
  scroll(true);
  return { item, body, note };
}

function scroll(always) {
  const list = element("messages");
  if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 80) list.scrollTop = list.scrollHeight;
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  add("user", text);
  const shown = add("assistant", "");
  const answer = { role: "assistant", content: "" };
  asking = new AbortController();
  working(true);
  let drawn = false;
  const draw = () => {
    drawn = false;
    const follow = element("messages").scrollHeight - element("messages").scrollTop - element("messages").clientHeight < 80;
    shown.body.textContent = answer.content;
    scroll(follow);
  };
  let first = 0, tokens = 0, reason = "stopped", failed = false;
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal: asking.signal,
      body: JSON.stringify({
        messages: conversation,
        stream: true,
        temperature: Number(element("temperature").value),
        repetition_penalty: Number(element("penalty").value),
        max_tokens: Number(element("tokens").value),
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        if (choice.delta?.content) {
          first ||= performance.now();
          answer.content += choice.delta.content;
          if (!drawn) drawn = requestAnimationFrame(draw) > 0;
        }
        if (choice.finish_reason) reason = choice.finish_reason === "length" ? "token limit reached" : "ended";
      }
    }
    const seconds = (performance.now() - first) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(tokens > 100 ? 0 : 1)} tokens/s` : "";
    shown.note.textContent = `${tokens} tokens${speed}, ${reason}`;
  } catch (error) {
    failed = error.name !== "AbortError";
    shown.item.classList.toggle("failed", failed);
    shown.note.textContent = failed ? error.message : "stopped";
  }
  draw();
  if (failed) {
    // The message was not answered: it is no part of the conversation, and can be sent again.
    conversation.pop();
    element("prompt").value ||= text;
    grow();
  } else {
    conversation.push(answer);
  }
  asking = null;
  working(false);
}

function working(is) {
  element("stop").hidden = !is;
  element("send").hidden = is;
}

function grow() {
  const field = element("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function show(view) {
  document.querySelector("main").dataset.view = view;
  element("show-chat").setAttribute("aria-pressed", view === "chat");
  element("show-live").setAttribute("aria-pressed", view === "live");
  window.dispatchEvent(new Event("resize"));
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value;
  if (!text.trim() || asking) return;
  element("prompt").value = "";
  grow();
  send(text);
});
element("prompt").addEventListener("keydown", (event) => {
  const touch = matchMedia("(pointer: coarse)").matches; // there Enter is the only way to a new line
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});
element("prompt").addEventListener("input", grow);
element("stop").addEventListener("click", () => asking?.abort());
element("forget").addEventListener("click", () => {
  asking?.abort();
  conversation.length = 0;
  element("messages").replaceChildren();
});
element("show-chat").addEventListener("click", () => show("chat"));
element("show-live").addEventListener("click", () => show("live"));
async function describe() {
  const response = await ask("/v1/models");
  if (!response.ok || (await response.json()).data[0].chat_template) return;
  element("hint").textContent =
    "This model was not taught to converse: it goes on with the text it is given. Begin one, for instance def fibonacci(n):";
}

describe();
look();
