// Long jobs: start one, see how far it is, cancel it, go to its result.
import { html, useEffect, useState } from "../lib/ui.js";
import { forget, get, post, useGet } from "../lib/api.js";
import { Failure } from "../lib/parts.js";
import { duration } from "../lib/text.js";

const listeners = new Set();
let state = { jobs: [], error: null };
let timer;

function publish(next) {
  state = next;
  listeners.forEach((listener) => listener(state));
}

// Ask for the jobs now, and again soon while one of them is not done.
export async function refresh() {
  clearTimeout(timer);
  try {
    const { jobs } = await get("/api/jobs");
    const ended = jobs.some((job) => job.state === "done" && state.jobs.some((old) => old.id === job.id && old.state !== "done"));
    publish({ jobs, error: null });
    if (ended) forget();
  } catch (error) {
    publish({ ...state, error: error.message });
  }
  const active = state.jobs.some((job) => job.state === "queued" || job.state === "running");
  timer = setTimeout(refresh, document.hidden ? 15000 : active ? 800 : 5000);
}

// From now on, know what is running.
export function watch() {
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  refresh();
}

export function useJobs() {
  const [current, set] = useState(state);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  return current;
}

export function useStart() {
  const [error, setError] = useState(null);
  const start = (body) => {
    setError(null);
    post("/api/jobs", body).then(refresh, (failed) => setError(failed.message));
  };
  return [start, error];
}

export const cancel = (job) => post(`/api/jobs/${job.id}/cancel`, {}).then(refresh, refresh);

export function StartScan() {
  const [start, error] = useStart();
  const [methods, setMethods] = useState("quick");
  return html`<form class="row" onSubmit=${(e) => (e.preventDefault(), start({ kind: "scan", methods }))}>
    <label>Scan <select value=${methods} onChange=${(e) => setMethods(e.target.value)}>
      <option value="quick">quick: the cheap methods and roles</option>
      <option value="all">full: all methods and roles</option>
    </select></label>
    <button class="primary">Start</button>
    ${error && html`<${Failure} error=${error} />`}
  </form>`;
}

function StartOther() {
  const [start, error] = useStart();
  const choices = useGet("/api/choices");
  const [method, setMethod] = useState("");
  const [role, setRole] = useState("");
  if (!choices.value) return choices.error ? html`<${Failure} error=${choices.error} />` : null;
  const { methods, roles } = choices.value;
  return html`
    <form class="row" onSubmit=${(e) => (e.preventDefault(), start({ kind: "score", method: method || methods[0] }))}>
      <label>Score <select value=${method || methods[0]} onChange=${(e) => setMethod(e.target.value)}>${methods.map((m) => html`<option>${m}</option>`)}</select></label>
      <button>Start</button>
    </form>
    <form class="row" onSubmit=${(e) => (e.preventDefault(), start({ kind: "verify", role: role || roles[0] }))}>
      <label>Verify <select value=${role || roles[0]} onChange=${(e) => setRole(e.target.value)}>${roles.map((r) => html`<option>${r}</option>`)}</select></label>
      <button>Start</button>
    </form>
    ${error && html`<${Failure} error=${error} />`}`;
}

export function Progress({ job }) {
  const known = job.steps > 0;
  return html`<span class="progress">
    ${known ? html`<progress max=${job.steps} value=${job.step}></progress>` : html`<progress></progress>`}
    <span>${job.what}${known ? ` ${job.step}/${job.steps}` : ""}${job.seconds_left ? `, about ${duration(job.seconds_left)} left` : ""}</span>
  </span>`;
}

export const RUNS = { name: "Runs", path: /^\/runs$/, href: "/runs", key: "r", does: "the runs", View: RunsView };

function RunsView({ server }) {
  const { jobs } = useJobs();
  return html`
    <header class="title"><h1>Runs</h1>
      <p class="soft">One at a time; the others wait. A finished run stays here until headscope ends${server?.out ? html`, and is written to <code>${server.out}</code> at once` : ""}. You may close the page meanwhile.</p></header>
    <section class="panel"><h2>Start one</h2><${StartScan} />${server?.atlas && html`<${StartOther} />`}</section>
    <section class="panel"><h2>All runs</h2>
      ${!jobs.length && html`<p class="soft">None yet.</p>`}
      <ul class="jobs">${jobs.map((job) => html`<li key=${job.id}>
        <span class=${`state ${job.state}`}>${job.state}</span>
        <b>${job.title}</b>
        ${job.state === "running" && html`<${Progress} job=${job} />`}
        ${(job.state === "running" || job.state === "queued") && html`<button onClick=${() => cancel(job)}>Cancel</button>`}
        ${job.seconds !== null && html`<span class="soft">${duration(job.seconds)}</span>`}
        ${job.result && html`<a href=${job.result.view}>show</a>`}
        ${job.result?.out && html`<code class="soft">${job.result.out}</code>`}
        ${job.result?.reason && html`<p>${job.result.verdict}: ${job.result.reason}</p>`}
        ${job.error && html`<${Failure} error=${job.error} />`}
      </li>`)}</ul>
    </section>`;
}
