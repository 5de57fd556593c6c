// The page of a server: all views, and what is running.
import { html, useEffect, useState } from "./lib/ui.js";
import { viewHref } from "./lib/address.js";
import { start } from "./lib/frame.js";
import { ATLAS } from "./views/atlas.js";
import { HEAD } from "./views/head.js";
import { PROMPT } from "./views/prompt.js";
import { TRY } from "./views/try.js";
import { Progress, RUNS, cancel, useJobs, watch } from "./views/runs.js";

function Status({ server }) {
  const { jobs, error } = useJobs();
  useEffect(() => void watch(), []);
  const [closed, close] = useState(() => new Set());
  const running = jobs.find((job) => job.state === "running");
  const waiting = jobs.filter((job) => job.state === "queued").length;
  const failed = jobs.filter((job) => job.state === "failed" && !closed.has(job.id));
  return html`<footer class="status" role="status">
    ${error && html`<span class="failure">${error}</span>`}
    ${running && html`<span><a href=${viewHref("/runs")}>${running.title}</a> <${Progress} job=${running} /> <button onClick=${() => cancel(running)}>Cancel</button></span>`}
    ${waiting > 0 && html`<span class="soft">${waiting} waiting</span>`}
    ${failed.map((job) => html`<span class="failure" key=${job.id}>${job.title}: ${job.error} <button aria-label="Close" onClick=${() => close(new Set([...closed, job.id]))}>×</button></span>`)}
    ${server?.refused && html`<span class="failure">${server.refused}</span>`}
  </footer>`;
}

start([ATLAS, PROMPT, TRY, RUNS, HEAD], Status);
