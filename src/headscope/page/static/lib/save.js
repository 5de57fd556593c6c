// What a view shows as a file: the server draws it as Python and the command line would.
import { html, useState } from "./ui.js";
import { post } from "./api.js";
import { download } from "./download.js";
import { Failure } from "./parts.js";
import { saved } from "./saved.js";

const FORMATS = ["svg", "png", "pdf", "html", "json"];

// of: the body of /api/figure without its format; what: the figure in words; says: the label; more: other files {says, url, body}
export function Save({ of, what, says = "Save", more = [] }) {
  const [error, setError] = useState(null);
  if (saved) return null; // a saved report has no server to draw
  const save = (url, body) => {
    setError(null);
    post(url, body).then(download, (failed) => setError(failed.message));
  };
  return html`<details class="saves" onToggle=${() => setError(null)}>
    <summary aria-label=${`Save ${what}`}>${says}</summary>
    ${FORMATS.map((format) => html`<button type="button" class="small" onClick=${() => save("/api/figure", { ...of, format })}>.${format}</button> `)}
    ${more.map(({ says, url, body }) => html`<button type="button" class="small" onClick=${() => save(url, body)}>${says}</button>`)}
    ${error && html`<${Failure} error=${error} />`}
  </details>`;
}
