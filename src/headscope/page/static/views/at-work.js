// A method's top head at work: its attention on the prompt of the scan, which the atlas keeps.
import { html } from "../lib/ui.js";
import { headHref, useAddress } from "../lib/address.js";
import { useGet } from "../lib/api.js";
import { Failure, Waiting } from "../lib/parts.js";
import { Attention, Looked, useLook } from "../lib/pattern.js";
import { Save } from "../lib/save.js";
import { parseHead } from "../lib/text.js";

export function AtWork({ method }) {
  const found = useGet(`/api/example/${method.id}`);
  return html`<section class="panel">
    <h2>At work</h2>
    <p class="soft">Attention of <a href=${headHref(...parseHead(method.example))}>${method.example}</a>, the top head of ${method.id}, on the prompt of the scan.</p>
    ${found.error ? html`<${Failure} error=${found.error} />` : found.value ? html`<${Shown} ...${found.value} method=${method.id} />` : html`<${Waiting} />`}
  </section>`;
}

function Shown({ values, tokens, method }) {
  const look = useLook(useAddress(), tokens.length);
  return html`<div class="columns wide-left">
    <div><${Attention} values=${values} tokens=${tokens} look=${look} />
      <${Save} what="the head at work" of=${{ of: "example", method, query: look.locked?.q, key: look.locked?.k, sink: look.first ? undefined : 0 }} /></div>
    <div><${Looked} values=${values} tokens=${tokens} look=${look} /></div>
  </div>`;
}
