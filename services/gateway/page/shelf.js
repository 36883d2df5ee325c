// All stored conversations, each under a name of its own, so that two tabs in use at the same time do not overwrite each
// other. They are stored in the browser, or in the tab if the person chooses so.

import { Conversation } from "/page/conversation.js";
import { BROWSER, MAX_KEPT_CHARACTERS, TAB, keep, kept, keptNames, keptObject, onChange } from "/page/storage.js";

const BEGINNING = "conversation-";
const MAX_CONVERSATIONS = 100;
const ID = /^[0-9a-f]{16}$/;
const MAX_CHARACTERS = 1 << 22; // of all conversations; the oldest are deleted first

export class Shelf {
  #texts = new Map(); // id: { name, changed, text }, also of conversations that the browser does not store

  constructor() {
    this.#load();
  }

  // True if conversations are stored in the browser, so that they outlive the tab.
  get stays() {
    return kept("keep", BROWSER) !== "tab";
  }

  set stays(stays) {
    if (stays === this.stays) return;
    const [from, to] = stays ? [TAB, BROWSER] : [BROWSER, TAB];
    keep("keep", stays ? "" : "tab", BROWSER);
    for (const name of keptNames(BEGINNING, from)) keep(name, "", from);
    for (const [id, { text }] of this.#texts) keep(BEGINNING + id, text, to);
  }

  // Returns { id, name, changed } of each conversation, the latest first.
  get list() {
    const entries = [...this.#texts].map(([id, { name, changed }]) => ({ id, name, changed }));
    return entries.sort((one, other) => other.changed - one.changed);
  }

  // Returns the entries of `list` whose conversations contain all of these words, in any case.
  matching(words) {
    const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (!parts.length) return this.list;
    return this.list.filter(({ id }) => {
      const text = this.open(id)?.searched ?? "";
      return parts.every((part) => text.includes(part));
    });
  }

  // Returns all conversations as JSON, the latest first.
  toFile() {
    const conversations = this.list.map(({ id }) => ({ id, ...JSON.parse(this.#texts.get(id).text) }));
    return JSON.stringify({ neuronpipe: "conversations", conversations }, null, 1);
  }

  // Adds the conversations of a file that `toFile` has written; returns how many. One that is stored already is replaced
  // only by a later form of it. Throws an Error if the file is none of these.
  addFile(text) {
    let entries;
    try {
      const { neuronpipe, conversations } = JSON.parse(text);
      if (neuronpipe === "conversations" && Array.isArray(conversations)) entries = conversations;
    } catch {
      // reported below
    }
    if (!entries) throw new Error("This file has no conversations that were saved here.");
    const read = entries.map((one) => ID.test(one?.id) && Conversation.from(one.id, one)).filter(Boolean);
    if (read.length < entries.length) throw new Error("A conversation of this file is damaged, so none was loaded.");
    const added = read.filter(({ id, changed }) => !(this.#texts.get(id)?.changed >= changed));
    for (const one of added.slice(0, MAX_CONVERSATIONS).reverse()) this.put(one);
    return Math.min(added.length, MAX_CONVERSATIONS);
  }

  has(id) {
    return this.#texts.has(id);
  }

  // Returns an empty conversation, which is stored with its first message.
  make() {
    const bytes = crypto.getRandomValues(new Uint8Array(8)); // there is no randomUUID without TLS
    return new Conversation([...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(""));
  }

  // Returns a conversation; null if it is not stored.
  open(id) {
    return this.#texts.has(id) ? parse(id, this.#texts.get(id).text) : null;
  }

  put(conversation) {
    const { id, name, changed } = conversation;
    const text = conversation.toText(MAX_KEPT_CHARACTERS);
    if (!text) {
      this.remove(id);
      return;
    }
    this.#texts.set(id, { name, changed, text });
    this.#bound(id);
    while (!keep(BEGINNING + id, text, this.#where) && keptNames(BEGINNING, this.#where).length && this.#dropOldest(id));
  }

  remove(id) {
    this.#texts.delete(id);
    keep(BEGINNING + id, "", this.#where);
  }

  // Deletes all conversations; returns a function that restores them.
  clear() {
    const before = this.#texts;
    this.#texts = new Map();
    for (const id of before.keys()) keep(BEGINNING + id, "", this.#where);
    return () => {
      for (const [id, entry] of before) {
        this.#texts.set(id, entry);
        keep(BEGINNING + id, entry.text, this.#where);
      }
    };
  }

  // Calls changed(id) when another tab has changed or deleted a conversation, or changed("") if it may be any.
  onChange(changed) {
    onChange((name) => {
      const id = name.startsWith(BEGINNING) ? name.slice(BEGINNING.length) : "";
      if (name && !id && name !== "keep") return;
      if (id) this.#read(id);
      else this.#load();
      changed(id);
    });
  }

  get #where() {
    return this.stays ? BROWSER : TAB;
  }

  #load() {
    this.#texts.clear();
    for (const name of keptNames(BEGINNING, this.#where)) this.#read(name.slice(BEGINNING.length));
  }

  #read(id) {
    const conversation = Conversation.from(id, keptObject(BEGINNING + id, this.#where));
    if (!conversation) this.#texts.delete(id);
    else this.#texts.set(id, { name: conversation.name, changed: conversation.changed, text: kept(BEGINNING + id, this.#where) });
  }

  #bound(id) {
    let characters = 0;
    for (const { text } of this.#texts.values()) characters += text.length;
    while (this.#texts.size > MAX_CONVERSATIONS || characters > MAX_CHARACTERS) {
      const length = this.#dropOldest(id);
      if (!length) return;
      characters -= length;
    }
  }

  // Deletes the oldest other conversation; returns its number of characters, 0 if there is none.
  #dropOldest(except) {
    const oldest = this.list.findLast(({ id }) => id !== except);
    if (!oldest) return 0;
    const { length } = this.#texts.get(oldest.id).text;
    this.remove(oldest.id);
    return length;
  }
}

const parse = (id, text) => Conversation.from(id, JSON.parse(text));
