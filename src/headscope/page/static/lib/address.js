// The state of a view is its address: what is chosen stands in the path and the query, so that it can be shared, and
// back and forward work.
import { useEffect, useState } from "./ui.js";

const listeners = new Set();
const tell = () => listeners.forEach((listener) => listener());
addEventListener("popstate", tell);

export function go(href, { replace = false } = {}) {
  if (href === location.pathname + location.search) return;
  history[replace ? "replaceState" : "pushState"](null, "", href);
  tell();
}

// The same view with some of its query changed; null or "" takes a name out.
export function hrefWith(changes, path = location.pathname, from = location.search) {
  const query = new URLSearchParams(from);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  return path + (text ? `?${text}` : "");
}

export function headHref(layer, head) {
  // the prompt goes along from head to head, what was chosen in it does too
  const kept = new URLSearchParams();
  for (const name of ["prompt", "q", "k", "token", "examples", "sink"]) {
    const value = new URLSearchParams(location.search).get(name);
    if (value !== null && location.pathname.startsWith("/head/")) kept.set(name, value);
  }
  const text = kept.toString();
  return `/head/${layer}/${head}${text ? `?${text}` : ""}`;
}

export function useAddress() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  const query = new URLSearchParams(location.search);
  return {
    path: location.pathname,
    get: (name) => query.get(name),
    set: (changes, options) => go(hrefWith(changes), options),
  };
}

// Links inside the page do not load it anew.
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (link.target || link.origin !== location.origin || link.pathname.startsWith("/static/")) return;
  event.preventDefault();
  go(link.pathname + link.search);
  scrollTo(0, 0);
});
