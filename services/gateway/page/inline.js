// Parses Markdown within a paragraph: emphasis, code, links. Turns text into a tree of strings and
// { tag, children, ... } without touching the document, in time proportional to the length of any text.

const SCHEMES = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 16; // of nested elements; deeper ones stay text
const TAGS = { 1: "em", 2: "strong" };
const SPACE = /^\s?$/u; // matches the edge of the text too
const MARK = /[\p{P}\p{S}]/u;
const ESCAPED = /[!-/:-@[-`{-~]/;
// The target of a link after its label, and a title, which is not shown. Blanks are bounded to bound the time.
const TARGET = /\(\s{0,4}(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s{1,4}(?:"[^"]*"|'[^']*'))?\s{0,4}\)/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>[\]`]{1,2000}/y;
const BREAK = /<br ?\/?>/iy;

export function inline(text) {
  return new Line(text).parts;
}

// Returns the address if it is safe to follow; else null.
export function safe(address) {
  try {
    const url = new URL(address); // refuses relative addresses, which would lead into this page
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class Line {
  parts = []; // the tree so far; marks that may open an element are strings in it
  #openers = []; // { mark, count, place }: emphasis that may begin at the part with index place
  #open = { "*": 0, _: 0, "~": 0 }; // number of openers with this mark
  #brackets = []; // indices of the parts at which labels may begin
  #unclosed = new Set(); // lengths of runs of backticks of which no closing run follows
  #plain = "";

  constructor(text) {
    for (let at = 0; at < text.length; ) at = this.#take(text, at);
    this.#flush();
  }

  // Parses the element or character at this index; returns the index after it.
  #take(text, at) {
    const character = text[at];
    switch (character) {
      case "\\":
        if (at + 1 < text.length && ESCAPED.test(text[at + 1])) {
          this.#plain += text[at + 1];
          return at + 2;
        }
        break;
      case "\n":
        this.#plain = this.#plain.trimEnd().replace(/\\$/, "");
        this.#add({ tag: "br" });
        return at + 1;
      case "`":
        return this.#code(text, at);
      case "*": case "_": case "~":
        return this.#emphasis(text, at);
      case "!": case "[": {
        const label = character === "[" ? "[" : "![";
        if (!text.startsWith(label, at)) break;
        this.#add(label);
        this.#brackets.push(this.parts.length - 1);
        return at + label.length;
      }
      case "]":
        return this.#link(text, at);
      case "<": {
        const [all, address] = match(ANGLED, text, at) ?? [];
        if (all && safe(address)) {
          this.#add({ tag: "a", href: safe(address), children: [address.replace(/^mailto:/, "")] });
          return at + all.length;
        }
        const br = match(BREAK, text, at);
        if (!br) break;
        this.#add({ tag: "br" });
        return at + br[0].length;
      }
      case "h": {
        if (this.#brackets.length || /[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) break;
        const address = trimmed(match(BARE, text, at)?.[0] ?? "");
        if (!address || !safe(address)) break;
        this.#add({ tag: "a", href: safe(address), children: [address] });
        return at + address.length;
      }
    }
    this.#plain += character;
    return at + 1;
  }

  #flush() {
    if (this.#plain) this.parts.push(this.#plain);
    this.#plain = "";
  }

  #add(part) {
    this.#flush();
    this.parts.push(part);
  }

  #code(text, at) {
    const count = run(text, at);
    const after = at + count;
    if (!this.#unclosed.has(count)) {
      for (let end = text.indexOf("`", after); end >= 0; ) {
        const ending = run(text, end);
        if (ending === count) {
          const code = text.slice(after, end).replaceAll("\n", " ");
          const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
          this.#add({ tag: "code", children: [padded ? code.slice(1, -1) : code] });
          return end + count;
        }
        end = text.indexOf("`", end + ending);
      }
      this.#unclosed.add(count);
    }
    this.#plain += text.slice(at, after);
    return after;
  }

  #emphasis(text, at) {
    const mark = text[at];
    let count = run(text, at);
    const after = at + count;
    const [before, next] = [text[at - 1] ?? "", text[after] ?? ""];
    const opens = !SPACE.test(next) && (!MARK.test(next) || SPACE.test(before) || MARK.test(before));
    const closes = !SPACE.test(before) && (!MARK.test(before) || SPACE.test(next) || MARK.test(next));
    const inWord = mark === "_" && opens && closes; // as in snake_case
    if (mark === "~" && count !== 2) {
      this.#plain += mark.repeat(count);
      return after;
    }
    this.#flush();
    while (count && closes && this.#open[mark] && !(inWord && !MARK.test(next))) count -= this.#close(mark, count);
    if (!count) return after;
    this.parts.push(mark.repeat(count));
    if (opens && !(inWord && !MARK.test(before))) {
      this.#openers.push({ mark, count, place: this.parts.length - 1 });
      this.#open[mark]++;
    }
    return after;
  }

  // Ends the emphasis of the last opener with this mark; returns the number of marks that this used.
  #close(mark, count) {
    while (this.#openers.at(-1).mark !== mark) this.#forgetOpener();
    const opener = this.#openers.at(-1);
    const took = Math.min(2, count, opener.count);
    while (this.#brackets.at(-1) > opener.place) this.#brackets.pop();
    const children = this.parts.splice(opener.place + 1);
    const depth = 1 + deepest(children);
    if (depth > MAX_DEPTH) {
      for (const child of children) this.parts.push(child);
      this.parts.push(mark.repeat(took));
      while (this.#openers.length) this.#forgetOpener(); // elements around it would be deeper still
      return took;
    }
    opener.count -= took;
    this.parts[opener.place] = mark.repeat(opener.count);
    if (!opener.count) {
      this.#forgetOpener();
      this.parts.pop();
    }
    this.parts.push({ tag: mark === "~" ? "del" : TAGS[took], children, depth });
    return took;
  }

  #forgetOpener() {
    this.#open[this.#openers.pop().mark]--;
  }

  // Adds a link. An image becomes a link with its description, so that nothing is fetched from other servers.
  #link(text, at) {
    const place = this.#brackets.pop();
    const [all, angled, bare] = place === undefined ? [] : match(TARGET, text, at + 1) ?? [];
    const href = all && safe(angled ?? bare);
    if (!href) {
      this.#plain += "]";
      return at + 1;
    }
    this.#flush();
    while (this.#openers.at(-1)?.place > place) this.#forgetOpener();
    const children = this.parts.splice(place + 1);
    this.parts.pop();
    this.parts.push({ tag: "a", href, children: children.length ? children : [href], depth: 1 + deepest(children) });
    this.#brackets.length = 0; // links do not nest
    return at + 1 + all.length;
  }
}

const deepest = (parts) => parts.reduce((most, { depth = 0 }) => Math.max(most, depth), 0);

// Returns the length of the run of equal characters that begins at this index.
function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

// Returns an address without the punctuation of the sentence around it.
function trimmed(address) {
  let end = address.length;
  let [opened, closed] = [address.split("(").length, address.split(")").length];
  for (; end; end--) {
    const last = address[end - 1];
    if (last === ")") {
      if (closed <= opened) break;
      closed--;
    } else if (!".,;:!?'\"*_~".includes(last)) break;
  }
  return address.slice(0, end);
}
