// What is said, and how much of it is sent: as much as fits the model's context beside an answer. The oldest turns are
// left out first; the system prompt and the last question always stay.

const UNKNOWN = 0.4; // tokens a character, until an answer tells how many its prompt had
const MAX_SENT_MESSAGES = 4096; // the API takes no more
const VERSION = 1; // of what is kept

export class Conversation {
  turns = []; // { question, answer, note, ended, items }; items are what shows it
  leftOut = 0; // how many of them, from the oldest on, are not sent any more
  #tokensPerCharacter = UNKNOWN;

  ask(question) {
    const turn = { question, answer: "", note: "", ended: false, items: [] };
    this.turns.push(turn);
    return turn;
  }

  // As if it had never been asked.
  remove(turn, leftOutBefore) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    this.leftOut = leftOutBefore;
  }

  sent(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, answer, ended } of this.turns.slice(this.leftOut)) {
      messages.push({ role: "user", content: question });
      if (ended) messages.push({ role: "assistant", content: answer });
    }
    return messages;
  }

  // Leaves out turns until the rest has about so many tokens.
  fit(system, tokens) {
    const fits = (messages) => messages.length <= MAX_SENT_MESSAGES && characters(messages) * this.#tokensPerCharacter <= tokens;
    while (!fits(this.sent(system)) && this.leaveOut());
  }

  // Leaves out the oldest turn that is sent; false when only the last one is left.
  leaveOut() {
    if (this.leftOut + 1 >= this.turns.length) return false;
    this.leftOut++;
    return true;
  }

  // So many tokens had what was sent.
  counted(sent, tokens) {
    this.#tokensPerCharacter = tokens / Math.max(1, characters(sent));
  }

  // To be kept, in so many characters: the newest turns that fit; "" when there are none.
  toText(maxCharacters) {
    const turns = this.turns.map(({ question, answer, note, ended }) => ({ question, answer, note, ended }));
    const state = { version: VERSION, leftOut: this.leftOut, tokensPerCharacter: this.#tokensPerCharacter };
    let charactersLeft = maxCharacters - JSON.stringify({ ...state, turns: [] }).length;
    const first = 1 + turns.findLastIndex((turn) => (charactersLeft -= JSON.stringify(turn).length + 1) < 0);
    const newest = turns.slice(first);
    return newest.length ? JSON.stringify({ ...state, leftOut: Math.max(0, this.leftOut - first), turns: newest }) : "";
  }

  // Of what was kept, parsed; empty when it is damaged. An answer that was under way is what had come of it.
  static from(kept) {
    const conversation = new Conversation();
    if (kept?.version !== VERSION || !Array.isArray(kept.turns) || !kept.turns.every(isTurn)) return conversation;
    conversation.turns = kept.turns.map(({ question, answer, note, ended }) => ({
      question, answer, note: ended ? note : "stopped", ended: true, items: [],
    }));
    const { leftOut, tokensPerCharacter } = kept;
    if (Number.isInteger(leftOut) && leftOut > 0 && leftOut < conversation.turns.length) conversation.leftOut = leftOut;
    if (Number.isFinite(tokensPerCharacter) && tokensPerCharacter > 0) conversation.#tokensPerCharacter = tokensPerCharacter;
    return conversation;
  }
}

const isTurn = (one) => [one?.question, one?.answer, one?.note].every((text) => typeof text === "string");
const characters = (messages) => messages.reduce((sum, { content }) => sum + content.length, 0);
