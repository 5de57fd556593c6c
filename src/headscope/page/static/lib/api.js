// Questions to the server: JSON, and matrices as raw numbers behind a JSON head (see page/wire.py).
import { useEffect, useState } from "./ui.js";

export class Refused extends Error {}

async function answer(url, options) {
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

// half-precision floats by table: browsers without Float16Array are still around
let halves;
function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function matrix(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const start = 4 + length;
  if (head.dtype === "float32") return { ...head, values: new Float32Array(buffer, start) };
  if (!halves) {
    halves = new Float32Array(65536);
    for (let i = 0; i < 65536; i++) halves[i] = half(i);
  }
  const bits = new Uint16Array(buffer, start);
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = halves[bits[i]];
  return { ...head, values };
}

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
