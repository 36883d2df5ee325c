// Draws the open conversation: messages, answers, and the buttons of each.

import { introduction } from "/page/answer.js";
import { Prose } from "/page/prose.js";

const NEAR_END = 80; // pixels; a person who has scrolled further up is reading and stays there
const list = document.getElementById("messages");
const turns = new WeakMap(); // from list items to the turns that they show
const divider = Object.assign(document.createElement("li"), {
  className: "divider",
  textContent: "The messages above no longer fit the model's context and are not sent.",
});

// Draws a conversation from its beginning.
export function show(conversation) {
  list.replaceChildren();
  for (const turn of conversation.turns) add(turn);
  divide(conversation);
  scroll();
}

export function add(turn) {
  turn.view = new TurnView(turn);
  list.append(turn.view.question, turn.view.answer);
}

// Draws the line below which messages are sent.
export function divide({ leftOut, turns: all }) {
  if (leftOut) all[leftOut].view?.question.before(divider);
  else divider.remove();
}

// Shows the buttons of each turn that can be used now.
export function offer({ turns: all }, busy) {
  const followed = follows();
  let model = "";
  for (const turn of all) {
    turn.view?.introduce(turn.model !== model);
    turn.view?.offer(busy, turn === all.at(-1));
    model = turn.model || model;
  }
  if (followed) scroll();
}

export const scroll = () => (list.scrollTop = list.scrollHeight);
export const turnAt = (element) => turns.get(element.closest("#messages > li"));
const follows = () => list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;

// Settings that open and a phone's keyboard make the list lower: what was at its end stays there.
let wasAtEnd = true;
list.addEventListener("scroll", () => (wasAtEnd = follows()));
new ResizeObserver(() => wasAtEnd && scroll()).observe(list);

class TurnView {
  #turn;
  #prose = null;
  #drawing = 0; // the requested animation frame; 0: none

  constructor(turn) {
    this.#turn = turn;
    this.question = item("user", turn, make("pre", "body", turn.question), action("edit", "Edit"));
    this.answer = item(
      "assistant", turn, make("p", "about"), thought(), make("pre", "body"),
      make("small", "note"), action("copy", "Copy"), action("regenerate", "Regenerate"), action("continue", "Continue"),
    );
    this.draw();
  }

  // Draws the turn in the next frame, with all that arrives until then.
  update() {
    this.#drawing ||= requestAnimationFrame(() => this.draw());
  }

  // Draws the turn as it is now.
  draw() {
    cancelAnimationFrame(this.#drawing);
    this.#drawing = 0;
    const followed = follows();
    const { thought, answer, note, chat, ended, failed } = this.#turn;
    for (const one of [this.question, this.answer]) one.classList.toggle("chat", chat);
    const text = answer.replace(/^\n+/, "");
    if (chat && !this.#prose) {
      const body = make("div", "body prose");
      this.answer.querySelector(".body").replaceWith(body);
      this.#prose = new Prose(body);
    }
    if (this.#prose) this.#prose.update(text);
    else this.answer.querySelector(".body").textContent = text;
    this.#drawThought(thought, !answer && !ended);
    this.answer.querySelector(".note").textContent = note;
    this.answer.classList.toggle("working", !ended);
    this.answer.classList.toggle("failed", failed);
    if (followed) scroll();
  }

  // Draws what the model thinks, which stays folded until it is opened.
  #drawThought(text, thinks) {
    const details = this.answer.querySelector(".thought");
    details.hidden = !text;
    details.querySelector("summary").textContent = thinks ? "Thinking …" : "Thought";
    details.querySelector("p").textContent = text;
  }

  // Describes the model above its first answer.
  introduce(first) {
    const { model, chat } = this.#turn;
    const about = this.answer.querySelector(".about");
    about.textContent = first && model ? introduction(model, chat) : "";
  }

  // Shows the usable buttons. busy: an answer is under way; last: this is the last turn.
  offer(busy, last) {
    const { thought, answer, ended, failed, reason } = this.#turn;
    const possible = {
      edit: !busy && (last || !failed),
      copy: ended && answer,
      regenerate: !busy && last && ended,
      continue: !busy && last && (answer || thought) && ["length", "stopped"].includes(reason),
    };
    for (const [name, is] of Object.entries(possible)) {
      for (const one of [this.question, this.answer]) {
        const button = one.querySelector(`:scope > .foot [data-action="${name}"]`);
        if (button) button.hidden = !is;
      }
    }
    this.answer.classList.toggle("last", last);
    this.question.classList.toggle("last", last);
  }

  // Puts a form in place of the message. sent: called with the new text; a text that is not changed may be sent as well.
  edit(text, touch, sent) {
    const form = document.getElementById("edit-form").content.cloneNode(true).firstElementChild;
    const field = form.querySelector("textarea");
    const body = this.question.querySelector(".body");
    const foot = this.question.querySelector(".foot");
    const grow = () => {
      field.style.height = "auto";
      field.style.height = `${field.scrollHeight}px`;
    };
    const end = () => {
      form.remove();
      body.hidden = foot.hidden = false;
      foot.querySelector("button").focus();
    };
    body.hidden = foot.hidden = true;
    body.after(form);
    field.value = text;
    field.addEventListener("input", grow);
    form.querySelector('[data-action="cancel"]').addEventListener("click", end);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() && sent(field.value)) form.remove();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      else if (event.target === field && event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    grow();
    field.focus();
    field.setSelectionRange(text.length, text.length);
  }
}

function item(role, turn, ...parts) {
  const item = make("li", role);
  const foot = make("div", "foot");
  for (const part of parts) (part.matches(".about, .thought, .body") ? item : foot).append(part);
  item.append(foot);
  turns.set(item, turn);
  return item;
}

function thought() {
  const details = Object.assign(make("details", "thought"), { hidden: true });
  details.append(make("summary"), make("p"));
  return details;
}

function action(name, label) {
  const button = Object.assign(make("button", "quiet", label), { type: "button" });
  button.dataset.action = name;
  return button;
}

function make(tag, className = "", textContent = "") {
  return Object.assign(document.createElement(tag), { className, textContent });
}
