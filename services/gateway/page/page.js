// The chat: sending, streaming, stopping and replacing messages, and which conversation is open. live.js draws the run.

import { advice, all, answer, choose, defaultTokens, describe, introduction, templateError } from "/page/answer.js";
import { copy } from "/page/clipboard.js";
import { fileName, onFile, save as saveFile } from "/page/files.js";
import { stayAvailable } from "/page/installed.js";
import { drawList, hide, listen } from "/page/list.js";
import { look, lookAt } from "/page/live.js";
import { offerPrompts } from "/page/presets.js";
import { keepSettings, settings } from "/page/settings.js";
import { Shelf } from "/page/shelf.js";
import { keep, kept } from "/page/storage.js";
import { add, divide, offer, scroll, show, turnAt } from "/page/transcript.js";

const COPIED_MS = 2000;
const MAX_FILE_BYTES = 32 << 20;
const element = (id) => document.getElementById(id);
const touch = matchMedia("(pointer: coarse)"); // there Enter is the only way to a new line, and focus opens a keyboard
const shelf = new Shelf();
let conversation = shelf.open(kept("open")) ?? shelf.make();
let undoable = null; // { said: a sentence for the user, back: the function that undoes }, until the next message
let asking = null; // { turn, stop }, while an answer is under way
let delayed = ""; // why an answer may be slow to begin

const announce = (text) => (element("announcement").textContent = text); // for screen readers

// ---- sending -------------------------------------------------------------------------------------------------
function send(text, chosen) {
  const [asked, { leftOut }] = [conversation, conversation];
  undoable = null;
  const turn = asked.ask(text);
  add(turn);
  // A message without an answer is removed from the conversation and put back into the field, to be sent again.
  return run(turn, chosen, () => {
    asked.remove(turn, leftOut);
    if (asked !== conversation) return;
    element("prompt").value ||= text;
    grow();
  });
}

// Replaces a message, or sends it once more; it and all later messages are removed first.
function askAgain(turn, text, chosen) {
  const before = conversation.copy();
  const asked = conversation;
  const back = () => {
    if (conversation.id === before.id || shelf.has(before.id)) open(before);
  };
  asked.cutBefore(turn);
  const again = asked.ask(text);
  show(asked);
  undoable = { said: text === turn.question ? "The answer was replaced." : "Later messages were replaced.", back };
  return run(again, chosen, () => {
    if (asked !== conversation) return;
    undoable = null;
    back();
    add(again);
  });
}

function goOn(turn, chosen) {
  const { reason } = turn;
  undoable = null;
  Object.assign(turn, { ended: false, failed: false, note: "" });
  return run(turn, chosen, () => (turn.reason = reason));
}

// Streams the answer of a turn into it. failed: called if the request fails.
async function run(turn, chosen, failed) {
  const asked = conversation; // another conversation may be opened meanwhile
  const stop = new AbortController();
  asking = { turn, stop };
  note(turn);
  turn.view.draw();
  working(true);
  scroll();
  save();
  drawEntries();
  const prepared = () => {
    if (asked !== conversation) return;
    divide(asked);
    offer(asked, true);
  };
  const came = () => {
    turn.note = "";
    turn.view.update();
  };
  try {
    await answer(asked, turn, chosen, stop.signal, came, prepared);
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.note = stopped ? "stopped" : error.message;
    if (stopped) turn.reason = "stopped";
    else {
      turn.failed = true;
      failed();
    }
  }
  turn.ended = true;
  turn.view.draw();
  if (asking?.turn === turn) asking = null;
  turn.view.offer(false, false);
  if (asked.id === conversation.id) announce(`The answer: ${turn.note}`);
  if (asked === conversation) {
    divide(asked);
    save();
  } else if (asked.id !== conversation.id && shelf.has(asked.id)) shelf.put(asked);
  working(Boolean(asking));
  drawEntries();
}

// Writes what an answer waits for into its note, until it begins.
function note(turn) {
  if (!turn.answer) turn.note = delayed && `waiting: ${delayed}`;
}

function working(is) {
  const [there, gone] = is ? ["stop", "send"] : ["send", "stop"];
  const focused = document.activeElement === element(gone);
  element(there).hidden = false;
  element(gone).hidden = true;
  if (focused) element(there).focus();
  refresh();
}

// Shows the buttons that can be used now.
function refresh() {
  offer(conversation, Boolean(asking));
  for (const id of ["new", "new-in-list"]) element(id).disabled = !element("messages").children.length;
  element("models").disabled = Boolean(asking);
  element("undo-bar").hidden = !undoable;
  element("undo-said").textContent = undoable?.said ?? "";
}

// ---- conversations -------------------------------------------------------------------------------------------
function open(other) {
  asking?.stop.abort();
  asking = null;
  conversation = other;
  show(conversation);
  keep("open", conversation.id);
  save();
  working(false);
  drawEntries();
}

function begin() {
  open(shelf.make());
  hide();
  if (!touch.matches) element("prompt").focus();
}

function remove(id) {
  hide(); // the list would cover Undo
  const removed = id === conversation.id ? conversation : shelf.open(id);
  const shown = removed === conversation;
  undoable = {
    said: "The conversation was deleted.",
    back: () => {
      shelf.put(removed);
      if (shown) open(removed);
    },
  };
  shelf.remove(id);
  if (shown) open(shelf.make());
  refresh();
  drawEntries();
  announce("The conversation was deleted. Undo restores it.");
}

function removeAll() {
  const shown = conversation;
  const restore = shelf.clear();
  undoable = {
    said: "All conversations were deleted.",
    back: () => {
      restore();
      open(shown);
    },
  };
  open(shelf.make());
  hide();
  announce("All conversations were deleted. Undo restores them.");
}

function undo() {
  const { back } = undoable;
  undoable = null;
  back();
  refresh();
  drawEntries();
  announce("Undone.");
  if (!touch.matches) element("prompt").focus();
}

function rename(id, title) {
  const renamed = id === conversation.id ? conversation : shelf.open(id);
  if (!renamed) return;
  renamed.title = title;
  shelf.put(renamed);
  drawEntries();
}

const drawEntries = () => {
  drawList(shelf.matching(element("search").value), conversation.id);
  element("delete-all").disabled = element("save-all").disabled = !shelf.list.length;
  element("save-text").disabled = !conversation.turns.length;
};

function load(text) {
  try {
    const count = shelf.addFile(text);
    report(count ? `${count} ${count === 1 ? "conversation was" : "conversations were"} loaded.` : "All of them are here already.");
    changedElsewhere(conversation.id);
  } catch (error) {
    report(error.message);
  }
}

// Shows the result of loading a file, also to screen readers.
function report(sentence) {
  undoable = null;
  element("undo-bar").hidden = true;
  element("loaded").textContent = sentence;
}

function save() {
  if (conversation.turns.length || shelf.has(conversation.id)) shelf.put(conversation);
}

// Another tab has changed or deleted a conversation.
function changedElsewhere(id) {
  if (!asking && (!id || id === conversation.id) && !element("messages").querySelector("form")) {
    const now = shelf.open(conversation.id);
    if (now || conversation.turns.length) {
      conversation = now ?? shelf.make();
      show(conversation);
      keep("open", conversation.id);
    }
  }
  element("stays").checked = shelf.stays;
  refresh();
  drawEntries();
}

// ---- the page ------------------------------------------------------------------------------------------------
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

async function introduce() {
  const there = await all();
  const { name, chat } = await describe();
  const choice = element("models");
  choice.replaceChildren(...there.map((one) => new Option(one.name, one.name, false, one.name === name)));
  choice.hidden = there.length === 1;
  if (there.length > 1) lookAt(name);
  element("hint-text").textContent = introduction(name, chat) + (chat ? "" : " For example");
  element("example").hidden = chat;
  element("tokens").placeholder = defaultTokens(chat) ?? "as many as fit";
  element("advice").textContent = advice(name);
  element("ask").classList.toggle("chat", chat); // the style for prose; base models usually get code
  const error = chat ? await templateError(name).catch(() => "") : "";
  if ((await describe()).name !== name) return; // another model was chosen meanwhile
  const field = element("template-error");
  field.hidden = !error;
  field.textContent = error && `The chat template of ${name} fails, so it cannot answer: ${error}`;
}

async function copyFrom(button, text) {
  const said = (await copy(text)) ? "Copied" : "Copying failed";
  const label = button.textContent;
  if (label === said) return;
  button.textContent = said;
  announce(said);
  setTimeout(() => (button.textContent = label), COPIED_MS);
}

element("messages").addEventListener("click", ({ target }) => {
  const action = target.closest("[data-action]")?.dataset.action;
  const turn = action && turnAt(target);
  if (!turn) return;
  if (action === "copy") copyFrom(target, turn.answer.replace(/^\n+/, ""));
  if (action === "copy-code") copyFrom(target, target.closest("figure").querySelector("code").textContent);
  if (asking || !["edit", "regenerate", "continue"].includes(action)) return;
  if (action === "edit") {
    turn.view.edit(turn.question, touch.matches, (text) => {
      const chosen = asking ? null : settings();
      if (chosen) askAgain(turn, text, chosen);
      return Boolean(chosen);
    });
    return;
  }
  const chosen = settings();
  if (!chosen) return;
  if (!touch.matches) element("prompt").focus({ preventScroll: true }); // the button disappears
  if (action === "regenerate") askAgain(turn, turn.question, chosen);
  else goOn(turn, chosen);
});
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
element("models").addEventListener("change", ({ target }) => {
  choose(target.value);
  introduce();
});
element("stop").addEventListener("click", () => asking?.stop.abort());
element("new").addEventListener("click", begin);
element("new-in-list").addEventListener("click", begin);
element("delete-all").addEventListener("click", removeAll);
element("search").addEventListener("input", drawEntries);
element("save-text").addEventListener("click", () => saveFile(conversation.toMarkdown(), `${fileName(conversation.name)}.md`, "text/markdown"));
element("save-all").addEventListener("click", () => saveFile(shelf.toFile(), "conversations.json", "application/json"));
element("load").addEventListener("click", () => element("file").click());
onFile(element("file"), MAX_FILE_BYTES, load, report);
element("undo").addEventListener("click", undo);
element("stays").addEventListener("change", () => (shelf.stays = element("stays").checked));
element("show-chat").addEventListener("click", () => turnTo("chat"));
element("show-live").addEventListener("click", () => turnTo("live"));
window.addEventListener("beforeunload", () => asking?.stop.abort()); // otherwise it fails as if the server had ended
const leave = () => {
  if (asking) save();
  keep("draft", element("prompt").value);
};
window.addEventListener("pagehide", leave);
document.addEventListener("visibilitychange", () => document.hidden && leave());

keepSettings();
offerPrompts(element("system"), element("system-prompts"), element("keep-prompt"));
stayAvailable();
element("stays").checked = shelf.stays;
show(conversation);
keep("open", conversation.id);
element("prompt").value ||= kept("draft");
grow();
refresh();
drawEntries();
element("messages").removeAttribute("aria-busy");
listen({ open: (id) => open(shelf.open(id) ?? shelf.make()), rename, remove });
shelf.onChange(changedElsewhere);
introduce().catch(() => {}); // the models are requested again when they are needed
look((why) => {
  delayed = why;
  if (!asking || asking.turn.answer) return;
  note(asking.turn);
  asking.turn.view.update();
});
