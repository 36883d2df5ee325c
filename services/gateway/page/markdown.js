// Parses Markdown as models write it: headings, lists, quotes, tables, fenced code, rules, paragraphs. Turns lines into
// a tree of { tag, children, ... } without touching the document. HTML and lines that are only indented are text.

import { inline } from "/page/inline.js";

const MAX_DEPTH = 12; // of nested lists and quotes; deeper ones are paragraphs
const MAX_COLUMNS = 64;
const FENCE = /^(\s*)(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})(?: +(.*))?$/s;
const RULE = /^(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/s;
const DELIMITER = /^:?-+:?$/;
const TAB = 4; // columns
const TASK = /^\[([ xX])\] /;

// Returns the blocks of these lines, each with the index of its first line. That line and the next one determine the
// kind of a block, so that later lines never change earlier blocks.
export function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const kind = depth < MAX_DEPTH ? kindAt(lines, at) : lines[at].trim() ? paragraph : null;
    if (!kind) {
      at++;
      continue;
    }
    const [node, end] = kind(lines, at, depth);
    found.push({ ...node, line: at });
    at = end;
  }
  return found;
}

// Returns the function that parses the block at this line; null for an empty line.
function kindAt(lines, at) {
  const line = lines[at].trim();
  if (!line) return null;
  if (FENCE.test(line)) return fenced;
  if (HEADING.test(line)) return heading;
  if (RULE.test(line)) return rule;
  if (line.startsWith(">")) return quote;
  if (ITEM.test(line)) return list;
  return columns(lines, at) ? table : paragraph;
}

// Returns true if a paragraph ends before this line. Of numbered items only item 1 ends it, since other numbers at the
// beginning of a line are rarely items.
function interrupts(lines, at, depth) {
  if (depth >= MAX_DEPTH) return !lines[at].trim();
  const kind = kindAt(lines, at);
  if (kind !== list) return kind !== paragraph;
  const [, , mark, text] = ITEM.exec(lines[at].trim());
  return Boolean(text) && (mark.length === 1 || /^1[.)]$/.test(mark));
}

function paragraph(lines, from, depth) {
  let to = from + 1;
  while (to < lines.length && !interrupts(lines, to, depth)) to++;
  const text = lines.slice(from, to).map((line) => line.trimStart()).join("\n").trimEnd();
  return [{ tag: "p", children: inline(text) }, to];
}

// The highest heading becomes h3, below the page's own headings.
function heading(lines, at) {
  const [, marks, text = ""] = HEADING.exec(lines[at].trim());
  return [{ tag: `h${Math.min(6, marks.length + 2)}`, children: inline(text.replace(/(?:^| )#+$/, "")) }, at + 1];
}

function rule(lines, at) {
  return [{ tag: "hr", children: [] }, at + 1];
}

// A block without an end, as while it arrives, includes all further lines.
function fenced(lines, from) {
  const [, indent, fence, info] = FENCE.exec(lines[from].trimEnd());
  let to = from + 1;
  while (to < lines.length && !closes(lines[to], fence)) to++;
  const code = lines.slice(from + 1, to).map((line) => outdented(line, indentOf(indent)));
  const language = info.trim().split(/[\s{]/, 1)[0].slice(0, 40);
  return [{ tag: "pre", language, text: code.join("\n"), children: [] }, Math.min(lines.length, to + 1)];
}

const closes = (line, fence) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
const widthOf = (blank) => (blank === "\t" ? TAB : 1);

// Returns the indent of a line in columns.
function indentOf(line) {
  let columns = 0;
  for (const blank of line.slice(0, line.length - line.trimStart().length)) columns += widthOf(blank);
  return columns;
}

// Returns a line without this number of columns of its indent, or without all of its indent if that is less.
function outdented(line, columns) {
  let from = 0;
  while (columns > 0 && from < line.length && !line[from].trim()) columns -= widthOf(line[from++]);
  return line.slice(from);
}

function quote(lines, from, depth) {
  const inner = [];
  let at = from;
  for (; at < lines.length; at++) {
    const line = lines[at].trim();
    if (line.startsWith(">")) inner.push(line.replace(/^> ?/, ""));
    else if (!inner.at(-1).trim() || interrupts(lines, at, 0)) break;
    else inner.push(line);
  }
  return [{ tag: "blockquote", children: blocks(inner, depth + 1) }, at];
}

function list(lines, from, depth) {
  const kind = ITEM.exec(lines[from])[2];
  const items = [];
  let at = from;
  for (;;) {
    const [, , mark] = ITEM.exec(lines[at]) ?? [];
    if (mark?.at(-1) !== kind.at(-1) || RULE.test(lines[at].trim())) break;
    const [inner, end] = item(lines, at);
    items.push({ tag: "li", children: contents(blocks(inner, depth + 1)) });
    at = end;
    let next = at; // empty lines may lie between two items
    while (next < lines.length && !lines[next].trim()) next++;
    if (next === lines.length) break;
    at = next;
  }
  return [kind.length > 1 ? { tag: "ol", start: Number.parseInt(kind), children: items } : { tag: "ul", children: items }, at];
}

// Returns the lines of an item without their indent, and the index after it. An indent of two columns suffices even if
// the item's mark is wider, since models write that.
function item(lines, from) {
  const [all, indent, mark, text = ""] = ITEM.exec(lines[from]);
  const outer = indentOf(indent);
  const width = outer + (text ? all.length - text.length - indent.length : mark.length + 1);
  const least = Math.min(width, outer + 2);
  const inner = [text.replace(TASK, (_, done) => (done === " " ? "☐ " : "☑ "))];
  let fence = FENCE.exec(text)?.[2];
  let at = from + 1;
  for (; at < lines.length; at++) {
    const line = lines[at];
    const deep = indentOf(line);
    if (!line.trim()) inner.push("");
    else if (deep >= least) {
      const own = outdented(line, width);
      if (!fence) fence = FENCE.exec(own)?.[2];
      else if (closes(own, fence)) fence = undefined;
      inner.push(own);
    } else if (fence || !lines[at - 1].trim() || interrupts(lines, at, 0) || ITEM.test(line)) break;
    else inner.push(line.trimStart());
  }
  while (inner.length > 1 && !inner.at(-1)) inner.pop();
  return [inner, at];
}

// Returns the children of an item. The paragraph of an item with one paragraph becomes bare text, without margins.
function contents(inner) {
  const [first, ...rest] = inner;
  return first?.tag === "p" && rest.every(({ tag }) => tag === "ul" || tag === "ol") ? [...first.children, ...rest] : inner;
}

// Returns the alignments of the columns of a table that begins at this line; null if none begins.
function columns(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const marks = cells(lines[at + 1]);
  if (marks.length > MAX_COLUMNS || !marks.every((mark) => DELIMITER.test(mark))) return null;
  if (cells(lines[at]).length !== marks.length) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : ""));
}

function table(lines, from) {
  const aligned = columns(lines, from);
  const row = (line, tag) => {
    const texts = cells(line);
    return { tag: "tr", children: aligned.map((align, n) => ({ tag, align, children: inline(texts[n] ?? "") })) };
  };
  let to = from + 2;
  while (to < lines.length && kindAt(lines, to) === paragraph) to++;
  const rows = lines.slice(from + 2, to).map((line) => row(line, "td"));
  const head = { tag: "thead", children: [row(lines[from], "th")] };
  return [{ tag: "table", children: rows.length ? [head, { tag: "tbody", children: rows }] : [head] }, to];
}

// Returns the texts of a row's cells. A bar after a backslash belongs to the text.
function cells(line) {
  const row = line.trim().replace(/^\|/, "");
  const found = [];
  let from = 0;
  for (let at = 0; at < row.length; at++) {
    if (row[at] === "\\") at++;
    else if (row[at] === "|") {
      found.push(row.slice(from, at));
      from = at + 1;
    }
  }
  if (from < row.length) found.push(row.slice(from));
  return found.map((text) => text.trim().replaceAll("\\|", "|"));
}
