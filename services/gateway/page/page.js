// The chat: asking, streaming, stopping, starting anew. What the run does meanwhile is drawn by live.js.

import { Conversation } from "/page/conversation.js";
import { look, speed } from "/page/live.js";
import { ask, events, failure } from "/page/server.js";
import { keepSettings, settings } from "/page/settings.js";
import { MAX_KEPT_CHARACTERS, keep, kept, keptObject } from "/page/storage.js";

const NEAR_END = 80; // pixels: who has scrolled further up is reading, and stays there
const element = (id) => document.getElementById(id);
const divider = Object.assign(document.createElement("li"), {
  className: "divider",
  textContent: "What is above does not fit the model's context any more, and is not sent.",
});
const touch = matchMedia("(pointer: coarse)"); // there Enter is the only way to a new line, and focus opens a keyboard
let conversation = Conversation.from(keptObject("conversation"));
let deleted = null; // by starting anew: { conversation, items }, until the next message is sent
let context = Infinity;
let asking = null;

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const body = document.createElement("pre");
  body.textContent = text;
  item.append(body, document.createElement("small"));
  element("messages").append(item);
  return item;
}

// Shows a turn; returns a function that shows its answer as it is by then.
function addTurn(turn) {
  turn.items = [add("user", turn.question), add("assistant", "")];
  const [body, note] = turn.items[1].children;
  return () => {
    const follow = follows(element("messages"));
    body.textContent = turn.answer.replace(/^\n+/, "");
    note.textContent = turn.note;
    if (follow) scroll();
  };
}

const follows = (list) => list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
const scroll = () => (element("messages").scrollTop = element("messages").scrollHeight);
const announce = (text) => (element("announcement").textContent = text); // for screen readers

async function send(text, chosen) {
  const asked = conversation; // starting anew puts another one in its place
  const leftOut = asked.leftOut;
  const turn = asked.ask(text);
  const show = addTurn(turn);
  let drawing = 0; // the frame in which what came will be drawn
  const draw = () => {
    drawing = 0;
    show();
  };
  scroll();
  deleted = null;
  asking = new AbortController();
  working(turn, true);
  save();
  try {
    turn.note = await stream(asked, chosen, asking.signal, (piece) => {
      turn.answer += piece;
      if (!drawing) drawing = requestAnimationFrame(draw);
    });
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.note = stopped ? "stopped" : error.message;
    if (!stopped) {
      // The message was not answered: it is no part of the conversation, and can be sent again.
      asked.remove(turn, leftOut);
      divide();
      turn.items[1].classList.add("failed");
      element("prompt").value ||= text;
      grow();
    }
  }
  turn.ended = true;
  draw();
  asking = null;
  working(turn, false);
  save();
  if (asked === conversation) announce(`The answer: ${turn.note}`);
}

// Passes on pieces as they come; returns what can be said of the answer.
async function stream(asked, chosen, signal, take) {
  const { sent, response } = await request(asked, chosen, signal);
  let first = 0, tokens = 0, reason = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) {
      tokens = event.usage.completion_tokens;
      asked.counted(sent, event.usage.prompt_tokens);
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
  const fast = tokens > 1 && seconds > 0 ? `, ${speed((tokens - 1) / seconds)} tokens/s` : "";
  const unsent = asked.leftOut ? `; the oldest ${2 * asked.leftOut} messages were left out` : "";
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${fast}, ${reason}${unsent}`;
}

// Sends what fits. How many tokens a text has only the server knows: what it finds too long is shortened once more.
async function request(asked, { system, temperature, penalty, tokens }, signal) {
  if (context === Infinity) await describe();
  asked.fit(system, context - Math.min(tokens, context / 2));
  for (;;) {
    divide();
    const sent = asked.sent(system);
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      signal,
      body: JSON.stringify({
        messages: sent,
        stream: true,
        temperature,
        repetition_penalty: penalty,
        max_tokens: tokens,
        stream_options: { include_usage: true },
      }),
    });
    if (response.ok) return { sent, response };
    const problem = await failure(response);
    if (problem.code !== "context_length_exceeded" || !asked.leaveOut()) throw problem;
  }
}

// Shows from where on messages are sent.
function divide() {
  if (conversation.leftOut) conversation.turns[conversation.leftOut].items[0].before(divider);
  else divider.remove();
}

function working(turn, is) {
  turn.items[1].classList.toggle("working", is);
  const [there, gone] = is ? ["stop", "send"] : ["send", "stop"];
  const focused = document.activeElement === element(gone);
  element(there).hidden = false;
  element(gone).hidden = true;
  if (focused) element(there).focus();
  offer();
}

// What can be done now: starting anew, or taking that back.
function offer() {
  element("forget").disabled = !element("messages").children.length;
  element("deleted").hidden = !deleted;
}

function startAnew() {
  asking?.abort();
  deleted = { conversation, items: [...element("messages").children] };
  conversation = new Conversation();
  element("messages").replaceChildren();
  save();
  offer();
  announce("The conversation is deleted. Undo restores it.");
  if (!touch.matches) element("prompt").focus();
}

function undo() {
  conversation = deleted.conversation;
  element("messages").replaceChildren(...deleted.items);
  deleted = null;
  save();
  offer();
  scroll();
  announce("The conversation is back.");
  if (!touch.matches) element("prompt").focus();
}

function save() {
  keep("conversation", conversation.toText(MAX_KEPT_CHARACTERS));
  keep("draft", element("prompt").value);
}

// Shows what was kept over a reload.
function restore() {
  for (const turn of conversation.turns) addTurn(turn)();
  divide();
  scroll();
  offer();
  element("prompt").value ||= kept("draft");
  grow();
}

function grow() {
  const field = element("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function turnTo(view) {
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
  element("hint-text").textContent = "This model was not trained for chat: it continues the text that you send. For example";
  element("example").hidden = false;
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value;
  if (!text.trim() || asking) return;
  const chosen = settings();
  if (!chosen) return;
  element("prompt").value = "";
  grow();
  send(text, chosen);
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
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
element("forget").addEventListener("click", startAnew);
element("undo").addEventListener("click", undo);
element("show-chat").addEventListener("click", () => turnTo("chat"));
element("show-live").addEventListener("click", () => turnTo("live"));
window.addEventListener("beforeunload", () => asking?.abort()); // or it would fail, as if the server had gone
window.addEventListener("pagehide", save);
document.addEventListener("visibilitychange", () => document.hidden && save());

keepSettings();
restore();
describe().catch(() => {}); // asked again when it is needed
look();
