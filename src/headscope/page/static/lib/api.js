// Questions to the server: JSON, and matrices.
import { useEffect, useState } from "./ui.js";
import { answerOf, saved } from "./saved.js";
import { matrix } from "./wire.js";

export class Refused extends Error {}

async function fromFile(url, method) {
  if (method) throw new Refused("This is a saved report; headscope serve ATLAS answers questions to the model.");
  const found = await answerOf(url);
  if (found === undefined) throw new Refused("This saved report has nothing at this address.");
  return found;
}

async function answer(url, options) {
  if (saved) return fromFile(url, options.method);
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("headscope serve does not answer; is it still running?");
  }
  if (!response.ok) {
    let text = `The server answered with status ${response.status}.`;
    try {
      text = (await response.json()).error || text;
    } catch {
      // not JSON: the status is all there is to say
    }
    throw new Refused(text);
  }
  return response.headers.get("content-type") === "application/json" ? response.json() : matrix(await response.arrayBuffer());
}

export const get = (url, signal) => answer(url, { signal });
export const post = (url, body, signal) =>
  answer(url, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });

// What was read stays until a job changed the atlas.
const kept = new Map();
const listeners = new Set();
export function forget() {
  kept.clear();
  listeners.forEach((listener) => listener());
}

function cached(url) {
  if (!kept.has(url)) {
    const promise = get(url);
    promise.catch(() => kept.delete(url));
    kept.set(url, promise);
  }
  return kept.get(url);
}

// {value, error, loading} of a GET; a url of null asks nothing.
export function useGet(url) {
  const [state, set] = useState({ loading: !!url });
  const [version, again] = useState(0);
  useEffect(() => {
    const listener = () => again((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  useEffect(() => {
    if (!url) return set({});
    let current = true;
    set((old) => ({ value: old.url === url ? old.value : undefined, url, loading: true }));
    cached(url).then(
      (value) => current && set({ url, value }),
      (error) => current && set({ url, error: error.message }),
    );
    return () => {
      current = false;
    };
  }, [url, version]);
  return state.url === url || !url ? state : { loading: true };
}

// {value, of, error, loading} of a POST that runs again when its body changes; a body of null asks nothing. Until the new
// answer is there, `value` is the old one, and `of` the body that it answers.
export function useAsk(url, body) {
  const text = body === null ? null : JSON.stringify(body);
  const [state, set] = useState({ loading: text !== null });
  useEffect(() => {
    if (text === null) return set({});
    const control = new AbortController();
    set((old) => ({ value: old.value, of: old.of, stale: true, loading: true, text }));
    post(url, JSON.parse(text), control.signal).then(
      (value) => set({ value, of: JSON.parse(text), text }),
      (error) => error.name !== "AbortError" && set({ error: error.message, text }),
    );
    return () => control.abort();
  }, [url, text]);
  return state.text === text || text === null ? state : { ...state, loading: true, stale: true };
}
