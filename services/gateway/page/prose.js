// Draws an answer in Markdown while it arrives. Blocks that cannot change any more stay; later ones are drawn again.
// Elements are created one by one and HTML is never parsed, so that all output of a model stays text.

import { blocks } from "/page/markdown.js";

export class Prose {
  #body;
  #text = "";
  #settled = 0; // number of characters that are not parsed again
  #elements = 0; // number of elements for these characters

  constructor(body) {
    this.#body = body;
  }

  // Shows a text. It usually begins with the previous text, and then only its end is drawn.
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
    // The last line may be incomplete, and a line can depend on the next one, so only blocks before these are settled.
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

// Updates a block of code in place, so that a selection in it and its button stay. Returns false for other elements.
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
