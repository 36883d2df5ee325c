// The service worker of the installed page: it answers requests for the page's own files while the server does not. All
// else, above all the API, it leaves to the browser, so no answer is ever stored. Files come from the server whenever it
// is there, so a new version of it needs no reload.

const STORE = "neuronpipe-page";
const isPageFile = (path) => path === "/" || path.startsWith("/page/");

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { method, url } = event.request;
  const { origin, pathname } = new URL(url);
  if (method === "GET" && origin === self.location.origin && isPageFile(pathname)) {
    event.respondWith(fromServer(event.request, pathname));
  }
});

// The page tells which files it has loaded, also before this worker began.
self.addEventListener("message", ({ data }) => {
  for (const path of data) if (isPageFile(path)) fromServer(path, path).catch(() => {});
});

async function fromServer(request, path) {
  const store = await caches.open(STORE);
  try {
    const response = await fetch(request);
    if (response.ok) await store.put(path, response.clone());
    return response;
  } catch (error) {
    const stored = await store.match(path);
    if (stored) return stored;
    throw error;
  }
}
