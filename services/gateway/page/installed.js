// The page as an installed app: it opens while the server does not answer, with the files that offline.js has stored.

const UNLISTED = ["/", "/page/icon.svg", "/page/app.webmanifest"]; // loaded by the browser itself
const mine = ({ name }) => name.startsWith(`${location.origin}/page/`);

// Starts the service worker, where the browser has one: over TLS and on this machine. It learns which files there are.
export async function stayAvailable() {
  try {
    await navigator.serviceWorker.register("/page/offline.js", { scope: "/" });
    const { active } = await navigator.serviceWorker.ready;
    const files = performance.getEntriesByType("resource").filter(mine);
    active.postMessage([...UNLISTED, ...files.map(({ name }) => new URL(name).pathname)]);
  } catch {
    // the browser has none or forbids it
  }
}
