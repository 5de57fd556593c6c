// The frame around the views: which one the address names, search, theme, keys, what is running.
import { html, render, useEffect, useRef, useState } from "./lib/ui.js";
import { go, headHref, useAddress } from "./lib/address.js";
import { useGet } from "./lib/api.js";
import { listed, useKeys } from "./lib/keys.js";
import { choose, chosen, effective, useTheme } from "./lib/theme.js";
import { parseHead } from "./lib/text.js";
import { Failure } from "./lib/parts.js";
import { AtlasView } from "./views/atlas.js";
import { HeadView } from "./views/head.js";
import { PromptView } from "./views/prompt.js";
import { TryView } from "./views/try.js";
import { Progress, RunsView, cancel, refresh, useJobs } from "./views/runs.js";

function Search({ field, atlas }) {
  const [wrong, setWrong] = useState("");
  function find(event) {
    event.preventDefault();
    const text = field.current.value.trim();
    const place = parseHead(text);
    const method = atlas?.methods.find((m) => m.id === text.toLowerCase());
    const role = atlas?.verdicts.find((v) => v.role === text.toLowerCase());
    const size = atlas?.model.anatomy;
    if (place && size && (place[0] >= size.n_layers || place[1] >= size.n_heads))
      return setWrong(`This model has ${size.n_layers} layers of ${size.n_heads} heads, counted from 0.`);
    if (!place && !method && !role) return setWrong("Write a head such as L5H3, a method or a role.");
    setWrong("");
    field.current.blur();
    go(place ? headHref(...place) : method ? `/?method=${method.id}` : `/?method=${role.method}&show=role:${role.role}`);
  }
  return html`<form class="search" role="search" onSubmit=${find}>
    <input ref=${field} type="search" placeholder="L5H3" aria-label="Find a head, a method or a role" list="known" maxlength="80"
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

function Status({ server }) {
  const { jobs, error } = useJobs();
  const [closed, close] = useState(() => new Set());
  const running = jobs.find((job) => job.state === "running");
  const waiting = jobs.filter((job) => job.state === "queued").length;
  const failed = jobs.filter((job) => job.state === "failed" && !closed.has(job.id));
  return html`<footer class="status" role="status">
    ${error && html`<span class="failure">${error}</span>`}
    ${running && html`<span><a href="/runs">${running.title}</a> <${Progress} job=${running} /> <button onClick=${() => cancel(running)}>Cancel</button></span>`}
    ${waiting > 0 && html`<span class="soft">${waiting} waiting</span>`}
    ${failed.map((job) => html`<span class="failure" key=${job.id}>${job.title}: ${job.error} <button aria-label="Close" onClick=${() => close(new Set([...closed, job.id]))}>×</button></span>`)}
    ${server?.refused && html`<span class="failure">${server.refused}</span>`}
  </footer>`;
}

function View({ path, server }) {
  const head = /^\/head\/(\d+)\/(\d+)$/.exec(path);
  if (path === "/") return html`<${AtlasView} server=${server} />`;
  if (head) return html`<${HeadView} layer=${Number(head[1])} head=${Number(head[2])} server=${server} />`;
  if (path === "/prompt") return html`<${PromptView} server=${server} />`;
  if (path === "/try") return html`<${TryView} server=${server} />`;
  if (path === "/runs") return html`<${RunsView} server=${server} />`;
  return html`<${Failure} error="There is no view at this address." />`;
}

function App() {
  const { path } = useAddress();
  const state = useGet("/api/state");
  const server = state.value;
  const atlas = useGet(server?.atlas ? "/api/atlas" : null).value;
  const theme = useTheme();
  const field = useRef();
  const dialog = useRef();
  useEffect(() => void refresh(), []);
  useEffect(() => {
    const where = path.startsWith("/head/") ? `L${path.split("/")[2]}H${path.split("/")[3]}` : { "/runs": "Runs", "/prompt": "Prompt", "/try": "Try" }[path] || "Atlas";
    document.title = `${where} · ${server?.model || "headscope"}`;
  }, [path, server]);
  const flip = () => choose(effective() === "dark" ? "light" : "dark");
  const help = () => (dialog.current.open ? dialog.current.close() : dialog.current.showModal());
  useKeys(
    [
      { key: "?", does: "this list", run: help },
      { key: "/", does: "find a head such as L5H3, a method or a role", run: () => field.current.focus() },
      { key: "d", does: "dark or light", run: flip },
      { key: "a", does: "the atlas", run: () => go("/") },
      { key: "p", does: "a prompt", run: () => go("/prompt") },
      { key: "t", does: "try edits", run: () => go("/try") },
      { key: "r", does: "the runs", run: () => go("/runs") },
    ],
  );
  return html`
    <a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <nav class="top">
      <a class="brand" href="/">headscope</a>
      <a href="/" aria-current=${path === "/" ? "page" : null}>Atlas</a>
      <a href="/prompt" aria-current=${path === "/prompt" ? "page" : null}>Prompt</a>
      <a href="/try" aria-current=${path === "/try" ? "page" : null}>Try</a>
      <a href="/runs" aria-current=${path === "/runs" ? "page" : null}>Runs</a>
      <${Search} field=${field} atlas=${atlas} />
      <button class="plain" onClick=${flip} title="Dark or light (d)" aria-label=${`Switch to ${theme === "dark" ? "light" : "dark"}`}>${theme === "dark" ? "☀" : "☾"}</button>
      ${chosen() !== "system" && html`<button class="plain small" onClick=${() => choose("system")} title="Follow the system again">auto</button>`}
      <button class="plain" onClick=${help} title="Keys (?)" aria-label="Keys">?</button>
    </nav>
    <main id="main" tabindex="-1">
      ${state.error ? html`<${Failure} error=${state.error} />` : html`<${View} path=${path} server=${server} />`}
    </main>
    <${Status} server=${server} />
    <${Help} dialog=${dialog} />`;
}

render(html`<${App} />`, document.getElementById("app"));
