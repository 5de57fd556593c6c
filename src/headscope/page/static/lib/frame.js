// The frame around the views: which one the address names, search, theme, keys.
import { html, render, useEffect, useRef, useState } from "./ui.js";
import { go, headHref, useAddress, viewHref } from "./address.js";
import { useGet } from "./api.js";
import { listed, useKeys } from "./keys.js";
import { choose, chosen, effective, useTheme } from "./theme.js";
import { parseHead, parseNeuron } from "./text.js";
import { Failure } from "./parts.js";

function Search({ field, atlas }) {
  const [wrong, setWrong] = useState("");
  const address = useAddress();
  function find(event) {
    event.preventDefault();
    const text = field.current.value.trim();
    const place = parseHead(text);
    const neuron = parseNeuron(text);
    if (neuron) return findNeuron(neuron);
    const method = atlas?.methods.find((m) => m.id === text.toLowerCase());
    const role = atlas?.verdicts.find((v) => v.role === text.toLowerCase());
    const size = atlas?.model.anatomy;
    if (place && size && (place[0] >= size.n_layers || place[1] >= size.n_heads))
      return setWrong(`This model has ${size.n_layers} layers of ${size.n_heads} heads, counted from 0.`);
    if (!place && !method && !role) return setWrong("Write a head such as L5H3, a neuron such as L5N7, a method or a role.");
    setWrong("");
    field.current.blur();
    go(place ? headHref(...place) : viewHref("/", method ? { method: method.id } : { method: role.method, show: `role:${role.role}` }));
  }
  // in the scores of neurons that are shown, or else in the first there are
  function findNeuron([layer, index]) {
    const scored = (atlas?.methods || []).filter((m) => m.dims.join() === "layer,neuron");
    const method = scored.find((m) => m.id === address.get("method")) || scored[0];
    if (!method) return setWrong("This atlas holds no scores of neurons.");
    const [layers, neurons] = method.shape;
    if (layer >= layers || index >= neurons) return setWrong(`${method.id} scores ${layers} layers of ${neurons} neurons, counted from 0.`);
    setWrong("");
    field.current.blur();
    go(viewHref("/", { method: method.id, at: `L${layer}N${index}` }));
  }
  return html`<form class="search" role="search" onSubmit=${find}>
    <input ref=${field} type="search" placeholder="L5H3" aria-label="Find a head, a neuron, a method or a role" list="known" maxlength="80"
      autocomplete="off" spellcheck=${false} onInput=${() => setWrong("")}
      onKeyDown=${(e) => e.key === "Escape" && (setWrong(""), e.target.blur())} />
    <datalist id="known">
      ${(atlas?.methods || []).map((m) => html`<option value=${m.id} />`)}
      ${(atlas?.verdicts || []).map((v) => html`<option value=${v.role} />`)}
    </datalist>
    ${wrong && html`<span class="hint" role="alert">${wrong}</span>`}
  </form>`;
}

function Help({ dialog }) {
  const [keys, setKeys] = useState([]);
  useEffect(() => {
    const shown = () => setKeys(listed());
    dialog.current.addEventListener("toggle", shown);
    return () => dialog.current?.removeEventListener("toggle", shown);
  }, []);
  return html`<dialog ref=${dialog} aria-label="Keys">
    <h2>Keys</h2>
    <dl>${keys.filter((k) => k.does).map((k) => html`<dt><kbd>${k.key === "Escape" ? "Esc" : [k.key].flat().join(" ")}</kbd></dt><dd>${k.does}</dd>`)}</dl>
    <form method="dialog"><button>Close</button></form>
  </dialog>`;
}

// The view whose `path` fits an address, and the numbers in that address.
function viewAt(path, views) {
  for (const view of views) {
    const found = view.path.exec(path);
    if (found) return [view, Object.fromEntries(Object.entries(found.groups || {}).map(([name, text]) => [name, Number(text)]))];
  }
  return [{ name: "headscope", View: () => html`<${Failure} error="There is no view at this address." />` }, {}];
}

function App({ views, Status }) {
  const { path } = useAddress();
  const [view, place] = viewAt(path, views);
  const listedViews = views.filter((v) => v.href);
  const state = useGet("/api/state");
  const server = state.value;
  const atlas = useGet(server?.atlas ? "/api/atlas" : null).value;
  const theme = useTheme();
  const field = useRef();
  const dialog = useRef();
  useEffect(() => {
    document.title = `${view.title?.(place) || view.name} · ${server?.model || "headscope"}`;
  }, [path, server]);
  const flip = () => choose(effective() === "dark" ? "light" : "dark");
  const help = () => (dialog.current.open ? dialog.current.close() : dialog.current.showModal());
  useKeys(
    [
      { key: "?", does: "this list", run: help },
      { key: "/", does: "find a head such as L5H3, a neuron such as L5N7, a method or a role", run: () => field.current.focus() },
      { key: "d", does: "dark or light", run: flip },
      ...listedViews.map(({ key, does, href }) => ({ key, does, run: () => go(viewHref(href)) })),
    ],
  );
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <nav class="top">
      <a class="brand" href=${viewHref("/")}>headscope</a>
      ${listedViews.map((v) => html`<a href=${viewHref(v.href)} aria-current=${v === view ? "page" : null}>${v.name}</a>`)}
      <${Search} field=${field} atlas=${atlas} />
      <button class="plain" onClick=${flip} title="Dark or light (d)" aria-label=${`Switch to ${theme === "dark" ? "light" : "dark"}`}>${theme === "dark" ? "☀" : "☾"}</button>
      ${chosen() !== "system" && html`<button class="plain small" onClick=${() => choose("system")} title="Follow the system again">auto</button>`}
      <button class="plain" onClick=${help} title="Keys (?)" aria-label="Keys">?</button>
    </nav>
    <main id="main" tabindex="-1">
      ${state.error ? html`<${Failure} error=${state.error} />` : html`<${view.View} ...${place} server=${server} />`}
    </main>
    ${Status && html`<${Status} server=${server} />`}
    <${Help} dialog=${dialog} />`;
}

// views: [{ name, path, View, title, href, key, does }]; those with an `href` are in the navigation and have a key
export function start(views, Status) {
  render(html`<${App} views=${views} Status=${Status} />`, document.getElementById("app"));
}
