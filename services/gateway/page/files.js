// Files of the person's device: saving a text, and choosing one to load.

const URL_MS = 60_000; // until a browser has begun the download

// Saves a text under a file name.
export function save(text, name, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), URL_MS);
}

// Returns a name for the file of a conversation.
export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";

// Calls chosen(text) with the content of a file whenever one is chosen in a field, or failed(why) if it is too large.
export function onFile(field, maxBytes, chosen, failed) {
  field.addEventListener("change", async () => {
    const [file] = field.files;
    field.value = ""; // the same file can be chosen again
    if (!file) return;
    if (file.size > maxBytes) failed(`The file is larger than ${maxBytes >> 20} MiB.`);
    else chosen(await file.text());
  });
}
