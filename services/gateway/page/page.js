// The chat: asking, streaming, stopping. What the run does meanwhile is drawn by live.js.

import { Conversation } from "/page/conversation.js";
import { look } from "/page/live.js";
import { ask, events, failure } from "/page/server.js";

const NEAR_END = 80; // pixels: who has scrolled further up is reading, and stays there
const element = (id) => document.getElementById(id);
const number = (id) => Number(element(id).value);
const conversation = new Conversation();
const divider = Object.assign(document.createElement("li"), {
  className: "divider",
  textContent: "What is above does not fit the model's context any more, and is not sent.",
});
let context = Infinity;
let asking = null;

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const body = document.createElement("pre");
  body.textContent = text;
  item.append(body, document.createElement("small"));
  element("messages").append(item);
  scroll();
  return item;
}

const follows = (list) => list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
const scroll = () => (element("messages").scrollTop = element("messages").scrollHeight);

async function send(text) {
  const question = conversation.add({ role: "user", content: text, item: add("user", text) });
  const answer = { role: "assistant", content: "", item: add("assistant", "") };
  const [body, note] = answer.item.children;
  const leftOut = conversation.leftOut;
  let drawn = false;
  const draw = () => {
    const follow = follows(element("messages"));
    body.textContent = answer.content.replace(/^\n+/, "");
    drawn = false;
    if (follow) scroll();
  };
  asking = new AbortController();
  working(answer.item, true);
  try {
    note.textContent = await stream(asking.signal, (piece) => {
      answer.content += piece;
      if (!drawn) drawn = requestAnimationFrame(draw) > 0;
    });
    conversation.add(answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    note.textContent = stopped ? "stopped" : error.message;
    answer.item.classList.toggle("failed", !stopped);
    if (stopped) {
      if (conversation.messages.includes(question)) conversation.add(answer); // unless it was forgotten meanwhile
    } else {
      // The message was not answered: it is no part of the conversation, and can be sent again.
      conversation.messages.splice(conversation.messages.indexOf(question), 1);
      conversation.leftOut = leftOut;
      divide();
      element("prompt").value ||= text;
      grow();
    }
  }
  draw();
  asking = null;
  working(answer.item, false);
}

// Passes on pieces as they come; returns what can be said of the answer.
async function stream(signal, take) {
  const { sent, response } = await request(signal);
  let first = 0, tokens = 0, reason = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      tokens = event.usage.completion_tokens;
      conversation.counted(sent, event.usage.prompt_tokens);
    }
    for (const choice of event.choices) {
      if (choice.delta?.content) {
        first ||= performance.now();
        take(choice.delta.content);
      }
      if (choice.finish_reason) reason = choice.finish_reason === "length" ? "token limit reached" : "ended";
    }
  }
  if (!reason) throw new Error("the answer broke off");
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(tokens > 100 ? 0 : 1)} tokens/s` : "";
  const unsent = conversation.leftOut ? `; the oldest ${conversation.leftOut} messages were left out` : "";
  return `${tokens} tokens${speed}, ${reason}${unsent}`;
}

// Sends what fits. How many tokens a text has only the server knows: what it finds too long is shortened once more.
async function request(signal) {
  const system = element("system").value.trim();
  conversation.fit(system, context - Math.min(number("tokens"), context / 2));
  for (;;) {
    divide();
    const sent = conversation.sent(system);
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal,
      body: JSON.stringify({
        messages: sent,
        stream: true,
        temperature: number("temperature"),
        repetition_penalty: number("penalty"),
        max_tokens: number("tokens"),
        stream_options: { include_usage: true },
      }),
    });
    if (response.ok) return { sent, response };
    const problem = await failure(response);
    if (problem.code !== "context_length_exceeded" || !conversation.leaveOut()) throw problem;
  }
}

// Shows from where on messages are sent.
function divide() {
  if (conversation.leftOut) conversation.messages[conversation.leftOut].item.before(divider);
  else divider.remove();
}

function working(item, is) {
  item.classList.toggle("working", is);
  element("stop").hidden = !is;
  element("send").hidden = is;
  element("forget").disabled = !element("messages").children.length;
}

function forget() {
  asking?.abort();
  conversation.clear();
  element("messages").replaceChildren();
  element("forget").disabled = true;
  element("prompt").focus();
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

async function describe() {
  const response = await ask("/v1/models");
  if (!response.ok) return;
  const [model] = (await response.json()).data;
  context = model.context_tokens;
  if (model.chat_template) return;
  element("hint-text").textContent = "This model was not taught to converse: it goes on with the text it is given. Begin one, for instance";
  element("example").hidden = false;
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
element("example").addEventListener("click", () => {
  element("prompt").value = element("example").textContent;
  element("prompt").focus();
});
element("stop").addEventListener("click", () => asking?.abort());
element("forget").addEventListener("click", forget);
element("show-chat").addEventListener("click", () => show("chat"));
element("show-live").addEventListener("click", () => show("live"));

describe();
look();
