// A conversation, and which part of it is sent: as much as fits the model's context beside an answer. The oldest turns
// are left out first; the system prompt and the last question are always sent.

const UNKNOWN = 0.4; // tokens per character, until the usage of a response is known
const MAX_SENT_MESSAGES = 4096; // limit of the API
const MAX_TITLE = 48; // characters of a question that become a title
const VERSION = 2; // of the stored form
const TEXTS = ["question", "answer", "note", "reason", "model"];

export class Conversation {
  // { question, thought, answer, note, reason, tokens, model, chat, ended, failed, view }. reason: why the answer has ended,
  // "stop", "length" or "stopped". thought: what the model thought before the answer. model: the name of the model that answers; chat: true if it was trained for chat.
  // failed: true if an error occurred, which the note describes. view: the object that displays the turn.
  turns = [];
  leftOut = 0; // number of oldest turns that are no longer sent
  title = ""; // "" until the user sets one
  changed = 0; // time of the last question, in ms
  #tokensPerCharacter = UNKNOWN;

  constructor(id) {
    this.id = id;
  }

  // Returns the title, or else the first words of the first question.
  get name() {
    const words = this.title || (this.turns[0]?.question ?? "").trim().replace(/\s+/g, " ");
    if (words.length <= MAX_TITLE) return words;
    const cut = words.slice(0, MAX_TITLE);
    return `${cut.slice(0, Math.max(MAX_TITLE / 2, cut.lastIndexOf(" "))).trimEnd()}…`;
  }

  ask(question, now = Date.now()) {
    const turn = { question, thought: "", answer: "", note: "", reason: "", tokens: 0, model: "", chat: false, ended: false, failed: false, view: null };
    this.turns.push(turn);
    this.changed = now;
    return turn;
  }

  // Removes a turn without an answer. leftOutBefore: the value of leftOut before the turn.
  remove(turn, leftOutBefore) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    this.leftOut = leftOutBefore;
  }

  // Removes this turn and all later ones. Turns that were left out may fit again.
  cutBefore(turn) {
    this.turns.splice(this.turns.indexOf(turn));
    this.leftOut = 0;
  }

  // Returns a copy without the views of its turns.
  copy() {
    const same = Object.assign(new Conversation(this.id), { title: this.title, leftOut: this.leftOut, changed: this.changed });
    same.turns = this.turns.map((turn) => ({ ...turn, view: null }));
    same.#tokensPerCharacter = this.#tokensPerCharacter;
    return same;
  }

  // Returns the messages to send. If the last message is an answer, it is to be continued, with the thought before it.
  sent(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, thought, answer, ended } of this.turns.slice(this.leftOut)) {
      messages.push({ role: "user", content: question });
      if (ended || answer || thought) messages.push({ role: "assistant", content: answer });
      if (!ended && thought) messages.at(-1).reasoning_content = thought;
    }
    return messages;
  }

  // Leaves out turns until the rest has at most this number of tokens, by estimate.
  fit(system, tokens) {
    const fits = (messages) => messages.length <= MAX_SENT_MESSAGES && characters(messages) * this.#tokensPerCharacter <= tokens;
    while (!fits(this.sent(system)) && this.leaveOut());
  }

  // Leaves out the oldest turn that is sent; returns false if only the last turn is left.
  leaveOut() {
    if (this.leftOut + 1 >= this.turns.length) return false;
    this.leftOut++;
    return true;
  }

  // Updates the estimate of tokens per character by the number of tokens of sent messages.
  counted(sent, tokens) {
    this.#tokensPerCharacter = tokens / Math.max(1, characters(sent));
  }

  // The title and all messages in lower case, to search in.
  get searched() {
    return [this.name, ...this.turns.flatMap(({ question, answer }) => [question, answer])].join("\n").toLowerCase();
  }

  // Returns the conversation as Markdown, to read. Thoughts are left out.
  toMarkdown() {
    const turns = this.turns.map(({ question, answer, model }) => `## You\n\n${question.trim()}\n\n## ${model || "The model"}\n\n${answer.trim()}\n`);
    return [`# ${this.name}\n`, ...turns].join("\n");
  }

  // Returns the stored form, with the newest turns that fit into maxCharacters; "" if none fits.
  toText(maxCharacters) {
    const turns = this.turns.map(({ view, failed, ...turn }) => turn);
    const { title, changed, leftOut } = this;
    const state = { version: VERSION, title, changed, leftOut, tokensPerCharacter: this.#tokensPerCharacter };
    let charactersLeft = maxCharacters - JSON.stringify({ ...state, turns: [] }).length;
    const first = 1 + turns.findLastIndex((turn) => (charactersLeft -= JSON.stringify(turn).length + 1) < 0);
    const newest = turns.slice(first);
    return newest.length ? JSON.stringify({ ...state, leftOut: Math.max(0, leftOut - first), turns: newest }) : "";
  }

  // Returns the conversation of a parsed stored form; null if it is damaged. An unfinished answer counts as stopped.
  static from(id, kept) {
    if (kept?.version !== VERSION || !Array.isArray(kept.turns) || !kept.turns.length || !kept.turns.every(isTurn)) return null;
    const conversation = new Conversation(id);
    conversation.turns = kept.turns.map(({ question, thought, answer, note, reason, tokens, model, chat, ended }) => {
      const turn = { question, thought: String(thought ?? ""), answer, note, reason, tokens: Number(tokens) || 0, model, chat: chat === true };
      return { ...turn, ...(ended ? {} : { note: "stopped", reason: "stopped" }), ended: true, failed: false, view: null };
    });
    const { title, changed, leftOut, tokensPerCharacter } = kept;
    if (typeof title === "string") conversation.title = title;
    if (Number.isFinite(changed)) conversation.changed = changed;
    if (Number.isInteger(leftOut) && leftOut > 0 && leftOut < conversation.turns.length) conversation.leftOut = leftOut;
    if (Number.isFinite(tokensPerCharacter) && tokensPerCharacter > 0) conversation.#tokensPerCharacter = tokensPerCharacter;
    return conversation;
  }
}

const isTurn = (one) => TEXTS.every((name) => typeof one?.[name] === "string");
const characters = (messages) =>
  messages.reduce((sum, { content, reasoning_content: thought = "" }) => sum + content.length + thought.length, 0);
