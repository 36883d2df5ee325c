// An answer in Markdown, drawn while it comes. Blocks that can change no more stay as they are; the last one is drawn anew.
// It makes elements one by one and never reads HTML: whatever a model says, it stays text.

import { blocks } from "/page/markdown.js";

export class Prose {
  #body;
  #text = "";
  #settled = 0; // how many characters will not be read again
  #elements = 0; // what these became

  constructor(body) {
    this.#body = body;
  }

  // Shows a text, which is mostly the one before and what came since.
  update(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text)) {
      this.#settled = this.#elements = 0;
      this.#body.replaceChildren();
    }
    this.#text = text;
    const lines = text.slice(this.#settled).split("\n");
    const found = blocks(lines);
    this.#draw(found);
    // The last line may go on, and a line can depend on the next one: only what is before these is settled.
    const last = found.findLastIndex(({ line }) => line + 2 < lines.length);
    if (last < 1) return;
    for (const line of lines.slice(0, found[last].line)) this.#settled += line.length + 1;
    this.#elements += last;
  }

  #draw(found) {
    const old = [...this.#body.children].slice(this.#elements);
    found.forEach((node, n) => {
      if (old[n] && grown(old[n], node)) return;
      const made = build(node);
      if (old[n]) old[n].replaceWith(made);
      else this.#body.append(made);
    });
    old.slice(found.length).forEach((one) => one.remove());
  }
}

// Whether an element could take what was added: the code in a block of which some is selected, or is being copied.
function grown(element, { tag, language, text }) {
  if (tag !== "pre" || !element.matches("figure") || element.dataset.language !== language) return false;
  element.querySelector("code").textContent = text;
  return true;
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return code(node);
  const element = document.createElement(node.tag);
  element.append(...(node.children ?? []).map(build));
  if (node.start !== undefined && node.start !== 1) element.start = node.start;
  if (node.align) element.className = node.align;
  if (node.href) Object.assign(element, { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  if (node.tag !== "table") return element;
  const wide = Object.assign(document.createElement("div"), { className: "wide-table", tabIndex: 0 });
  wide.append(element);
  return wide;
}

function code({ language, text }) {
  const figure = document.createElement("figure");
  figure.dataset.language = language;
  const caption = document.createElement("figcaption");
  const copy = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
  copy.dataset.action = "copy-code";
  copy.setAttribute("aria-label", language ? `Copy this ${language} code` : "Copy this code");
  const body = document.createElement("pre");
  body.tabIndex = 0;
  body.append(Object.assign(document.createElement("code"), { textContent: text }));
  caption.append(language, copy);
  figure.append(caption, body);
  return figure;
}
