// What is said, and how much of it is sent: as much as fits the model's context beside an answer. The oldest turns are
// left out first; the system text and the last message always stay.

const UNKNOWN = 0.4; // tokens a character, until an answer tells how many its prompt had

export class Conversation {
  messages = []; // { role, content, item }; item is what shows it
  leftOut = 0; // how many of them, from the oldest on, are not sent any more
  #perCharacter = UNKNOWN;

  add(message) {
    this.messages.push(message);
    return message;
  }

  clear() {
    this.messages.length = this.leftOut = 0;
  }

  sent(system) {
    const said = this.messages.slice(this.leftOut).map(({ role, content }) => ({ role, content }));
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  // Leaves out turns until the rest has about so many tokens.
  fit(system, tokens) {
    while (characters(this.sent(system)) * this.#perCharacter > tokens && this.leaveOut());
  }

  // Leaves out the oldest turn that is sent; false when only the last message is left.
  leaveOut() {
    const next = this.messages.findIndex(({ role }, n) => n > this.leftOut && role === "user");
    if (next < 0) return false;
    this.leftOut = next;
    return true;
  }

  // So many tokens had what was sent.
  counted(sent, tokens) {
    this.#perCharacter = tokens / Math.max(1, characters(sent));
  }
}

const characters = (messages) => messages.reduce((sum, { content }) => sum + content.length, 0);
