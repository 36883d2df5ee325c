// Copies text. Without TLS, browsers offer the clipboard only to pages of this machine; others copy a selection.

// Returns true if the text was copied.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "unseen", readOnly: true });
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}
