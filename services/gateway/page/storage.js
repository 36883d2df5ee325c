// What is kept over a reload. The tab keeps what belongs to it, in its session storage: it goes with the tab, and no other
// tab sees it. The browser keeps what is to be there another day, in its local storage, for all tabs of this server.
// A browser may forbid both or have no room. Then nothing is kept, and all else works.

const PREFIX = "neuronpipe-";
export const TAB = () => sessionStorage; // only to look at it may be forbidden
export const BROWSER = () => localStorage;
export const MAX_KEPT_CHARACTERS = 1 << 20; // of one text; browsers give five million in all

// Keeps a text under a name in place of the one before; "" and what is too long are not kept. Returns whether it worked:
// where there is no room the one before stays.
export function keep(name, text, where = TAB) {
  try {
    if (text && text.length <= MAX_KEPT_CHARACTERS) where().setItem(PREFIX + name, text);
    else where().removeItem(PREFIX + name);
    return true;
  } catch {
    return false;
  }
}

export function kept(name, where = TAB) {
  try {
    return where().getItem(PREFIX + name) ?? "";
  } catch {
    return "";
  }
}

// What was kept as JSON; null for what is damaged.
export function keptObject(name, where = TAB) {
  try {
    return JSON.parse(kept(name, where) || "null");
  } catch {
    return null;
  }
}

// The names that begin like this, and under which something is kept.
export function keptNames(beginning, where = TAB) {
  try {
    const names = Object.keys(where()).filter((name) => name.startsWith(PREFIX + beginning));
    return names.map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}

// Calls back with the name of what another tab keeps otherwise from now on; with "" when that may be anything.
export function onChange(changed) {
  window.addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) changed(key?.slice(PREFIX.length) ?? "");
  });
}
