// What the tab keeps over a reload: in its session storage, so that it goes with the tab and no other tab sees it.
// A browser may forbid it or have no room. Then nothing is kept, and all else works.

const PREFIX = "neuronpipe-";
export const MAX_KEPT_CHARACTERS = 1 << 20; // of one text; browsers give five million in all

// Keeps a text under a name in place of the one before; "" and what is too long are not kept.
export function keep(name, text) {
  try {
    sessionStorage.removeItem(PREFIX + name);
    if (text && text.length <= MAX_KEPT_CHARACTERS) sessionStorage.setItem(PREFIX + name, text);
  } catch { /* forbidden, or no room */ }
}

export function kept(name) {
  try {
    return sessionStorage.getItem(PREFIX + name) ?? "";
  } catch {
    return "";
  }
}

// What was kept as JSON; null for what is damaged.
export function keptObject(name) {
  try {
    return JSON.parse(kept(name) || "null");
  } catch {
    return null;
  }
}
