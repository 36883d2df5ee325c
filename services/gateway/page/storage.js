// Stores texts over a reload: in the tab's session storage, which ends with the tab and which no other tab sees; or in
// the browser's local storage, which stays and is common to all tabs of this server. A browser may forbid both or have
// no room. Then nothing is stored, and everything else works.

const PREFIX = "neuronpipe-";
export const TAB = () => sessionStorage; // a function, because even access to it may be forbidden
export const BROWSER = () => localStorage;
export const MAX_KEPT_CHARACTERS = 1 << 20; // of one text; browsers store five million in all

// Stores a text under a name, in place of an earlier text; an empty or too long text only removes it. Returns false if
// the browser has no room or forbids it; the earlier text then stays.
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

// Returns a value that was stored as JSON; null if there is none or it is damaged.
export function keptObject(name, where = TAB) {
  try {
    return JSON.parse(kept(name, where) || "null");
  } catch {
    return null;
  }
}

// Returns the names with this beginning under which a text is stored.
export function keptNames(beginning, where = TAB) {
  try {
    const names = Object.keys(where()).filter((name) => name.startsWith(PREFIX + beginning));
    return names.map((name) => name.slice(PREFIX.length));
  } catch {
    return [];
  }
}

// Calls changed(name) when another tab has changed the text under a name, or changed("") if it may be any name.
export function onChange(changed) {
  window.addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) changed(key?.slice(PREFIX.length) ?? "");
  });
}
