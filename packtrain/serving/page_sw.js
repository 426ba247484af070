// A browser that has seen llama-server's page at this address keeps it in a service worker, which would show it
// here for ever. Browsers ask for /sw.js anew; this worker takes the place of the old one, and removes itself.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(removeWorker()));

async function removeWorker() {
  await self.registration.unregister();
  for (const key of await caches.keys()) await caches.delete(key);
  for (const page of await self.clients.matchAll({ type: "window" })) page.navigate(page.url);
}
