// The state of a view is its address: what is chosen stands in the path and the query, so that it can be shared, and
// back and forward work. A saved report has no server behind its path: there the same address stands behind a #.
import { useEffect, useState } from "./ui.js";
import { saved } from "./saved.js";

const root = saved ? "#" : "";
const here = () => (saved ? location.hash || "#/" : location.pathname + location.search);
const parts = () => /^#?(?<path>[^?]*)(?<query>.*)$/.exec(here()).groups;

const listeners = new Set();
const tell = () => listeners.forEach((listener) => listener());
addEventListener("popstate", tell);

// To an address that one of the functions below has made.
export function go(href, { replace = false } = {}) {
  if (href === here()) return;
  history[replace ? "replaceState" : "pushState"](null, "", href);
  tell();
}

// The same view with some of its query changed; null or "" takes a name out.
export function hrefWith(changes, path = parts().path, from = parts().query) {
  const query = new URLSearchParams(from);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  return root + path + (text ? `?${text}` : "");
}

export const viewHref = (path, query = {}) => hrefWith(query, path, "");

export function headHref(layer, head) {
  // the prompt goes along from head to head, what was chosen in it does too
  const { path, query } = parts();
  const from = new URLSearchParams(path.startsWith("/head/") ? query : "");
  const kept = ["prompt", "q", "k", "token", "examples", "sink"].map((name) => [name, from.get(name)]);
  return viewHref(`/head/${layer}/${head}`, Object.fromEntries(kept));
}

export function useAddress() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  const { path, query } = parts();
  const given = new URLSearchParams(query);
  return {
    path,
    get: (name) => given.get(name),
    set: (changes, options) => go(hrefWith(changes), options),
  };
}

// Links inside the page do not load it anew.
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (link.target || link.origin !== location.origin || link.pathname.startsWith("/static/")) return;
  event.preventDefault();
  go(saved ? link.hash : link.pathname + link.search);
  scrollTo(0, 0);
});
