// The list of conversations: opening, renaming and deleting them.

const list = document.getElementById("entries");
const panel = document.getElementById("conversations");

// Draws the list, unless a title is being edited. entries: { id, name } of each; open: id of the open conversation.
export function drawList(entries, open) {
  const typing = list.querySelector("input");
  if (typing) return;
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  const [id, action] = [focused?.closest("li").dataset.id, focused?.dataset.action];
  list.replaceChildren(...entries.map((one) => entry(one, one.id === open)));
  if (focused) (button(id, action) ?? document.getElementById("prompt")).focus();
}

// Calls open(id), rename(id, title) or remove(id) when a button is used.
export function listen({ open, rename, remove }) {
  list.addEventListener("click", ({ target }) => {
    const id = target.closest("li")?.dataset.id;
    const action = target.closest("[data-action]")?.dataset.action;
    if (action === "open") {
      hide();
      open(id);
    } else if (action === "rename") edit(target.closest("li"), (title) => rename(id, title));
    else if (action === "delete") remove(id);
  });
}

// Hides the list where it covers the chat, on narrow screens.
export function hide() {
  if (panel.matches(":popover-open")) panel.hidePopover();
}

function entry({ id, name }, isOpen) {
  const item = document.getElementById("entry").content.cloneNode(true).firstElementChild;
  item.dataset.id = id;
  const [title, rename, remove] = item.children;
  title.textContent = title.title = name;
  if (isOpen) title.setAttribute("aria-current", "true");
  rename.setAttribute("aria-label", `Rename: ${name}`);
  remove.setAttribute("aria-label", `Delete: ${name}`);
  return item;
}

function edit(item, renamed) {
  const title = item.querySelector('[data-action="open"]');
  const field = Object.assign(document.createElement("input"), { value: title.textContent, maxLength: 200 });
  field.setAttribute("aria-label", "Title; leave empty to use the first words");
  let done = false;
  const end = (changed) => {
    if (done) return;
    done = true;
    const { id } = item.dataset;
    const focused = document.activeElement === field;
    field.replaceWith(title);
    if (changed) renamed(field.value.trim().replace(/\s+/g, " "));
    if (focused) button(id, "rename")?.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); // Escape would also hide the list
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  title.replaceWith(field);
  field.focus();
  field.select();
}

const button = (id, action) => list.querySelector(`li[data-id="${id}"] [data-action="${action}"]`);
