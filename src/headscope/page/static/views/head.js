// One head: its scores and ranks, its roles and their proof, and what it does on the reader's own prompt.
import { html, useEffect, useState } from "../lib/ui.js";
import { go, headHref, hrefWith, useAddress, viewHref } from "../lib/address.js";
import { useAsk, useGet } from "../lib/api.js";
import { css, strong } from "../lib/colour.js";
import { useKeys } from "../lib/keys.js";
import { Controls, Dose, Failure, Token, TokenTable, Verdict, Waiting } from "../lib/parts.js";
import { Attention, Looked, useLook } from "../lib/pattern.js";
import { saved } from "../lib/saved.js";
import { Save } from "../lib/save.js";
import { useTheme } from "../lib/theme.js";
import { AtWork } from "./at-work.js";
import { Progress, useJobs, useStart } from "./runs.js";
import { name, number, parseHead, percent, signed, visible } from "../lib/text.js";

const EXAMPLE = "When Mary and John went to the store, John gave a drink to";

export const HEAD = { name: "Head", path: /^\/head\/(?<layer>\d+)\/(?<head>\d+)$/, title: ({ layer, head }) => name(layer, head), View: HeadView };

function HeadView({ layer, head, server }) {
  const address = useAddress();
  const atlas = useGet(server?.atlas ? "/api/atlas" : null);
  const about = useGet(server?.atlas ? `/api/head/${layer}/${head}` : null);
  const size = atlas.value?.model.anatomy;
  const example = atlas.value?.methods.find((m) => m.example === name(layer, head));
  const to = (l, h) => size && l >= 0 && h >= 0 && l < size.n_layers && h < size.n_heads && go(headHref(l, h));
  useKeys(
    [
      { key: "ArrowLeft", does: "the head before", run: () => to(layer, head - 1) },
      { key: "ArrowRight", does: "the next head", run: () => to(layer, head + 1) },
      { key: "ArrowUp", does: "the layer above", run: () => to(layer + 1, head) },
      { key: "ArrowDown", does: "the layer below", run: () => to(layer - 1, head) },
    ],
  );
  const step = (l, h, text, label) =>
    size && l >= 0 && h >= 0 && l < size.n_layers && h < size.n_heads
      ? html`<a class="button" href=${headHref(l, h)} aria-label=${label} title=${label}>${text}</a>`
      : html`<span class="button off" aria-hidden="true">${text}</span>`;
  if (about.error) return html`<${Failure} error=${about.error} />`;
  return html`
    <header class="title head-title">
      <h1>${name(layer, head)}</h1>
      <div class="steps">
        ${step(layer, head - 1, "←", "The head before")}${step(layer, head + 1, "→", "The next head")}
        ${step(layer + 1, head, "↑", "The layer above")}${step(layer - 1, head, "↓", "The layer below")}
        <a class="button" href=${viewHref("/", { at: name(layer, head) })}>in the atlas</a>
      </div>
      <p class="soft">layer ${layer}, head ${head}${about.value ? html`, reads kv head ${about.value.kv_head}` : ""}${server ? html` of ${server.model}` : ""}</p>
    </header>
    <div class="columns">
      <div class="stacked"><section class="panel"><h2>Scores</h2>
        ${about.value ? html`<${Scores} rows=${about.value.scores} />` : server?.atlas === false ? html`<p>No atlas yet: <a href=${viewHref("/runs")}>scan</a> first.</p>` : html`<${Waiting} />`}
      </section>
      ${saved ? html`<${NoModel} />` : html`<${Examples} layer=${layer} head=${head} address=${address} />`}</div>
      <section class="panel"><h2>Roles</h2>
        ${about.value && html`<${Roles} about=${about.value} />${!saved && html`<${Test} component=${about.value.component} roles=${about.value.roles} />`}`}
      </section>
    </div>
    ${saved
      ? example && html`<${AtWork} method=${example} />`
      : html`<${OnPrompt} layer=${layer} head=${head} address=${address} server=${server} /><${ByWeights} layer=${layer} head=${head} address=${address} />`}
  `;
}

// What a saved report, which has no model, leaves to a server.
const NoModel = () => html`<section class="panel">
  <h2>On your prompt</h2>
  <p>This is a saved report. <code>headscope serve ATLAS</code>, with the folder that it comes from, shows where this head looks on your
    prompt and what it writes there, what is lost without it, where it acts most, what its weights say, and tests it alone for a role.</p>
</section>`;

function Scores({ rows }) {
  const theme = useTheme();
  return html`<div class="scroll"><table class="scores">
    <thead><tr><th>Method</th><th class="n">Score</th><th class="n">Rank</th><th>In the range of all heads</th></tr></thead>
    <tbody>${rows.map((row) => {
      const span = row.high - Math.min(0, row.low) || 1;
      const zero = (-Math.min(0, row.low) / span) * 100;
      const at = ((row.score - Math.min(0, row.low)) / span) * 100;
      return html`<tr>
        <td><a href=${viewHref("/", { method: row.method })}>${row.method}</a><br /><small class="soft">${row.higher_means}</small></td>
        <td class="n">${number(row.score)}${row.ci_low !== null && html`<br /><small class="soft">${number(row.ci_low)} … ${number(row.ci_high)}</small>`}</td>
        <td class="n">${row.rank === null ? "–" : number(row.rank, row.rank % 1 ? 1 : 0)}<small class="soft"> of ${row.of}</small></td>
        <td><span class="range" title=${`${number(row.low)} … ${number(row.high)}`}>
          ${row.score !== null && html`<i style=${{ left: `${Math.min(zero, at)}%`, width: `${Math.max(1, Math.abs(at - zero))}%`, background: css(row.score < 0 ? -0.6 : 0.6, theme) }}></i>`}
        </span></td>
      </tr>`;
    })}</tbody>
  </table></div>`;
}

function Roles({ about }) {
  if (!about.roles.length)
    return html`<p class="soft">Untested: this head was not among those chosen for a role${about.other_roles.length ? ` (${about.other_roles.join(", ")})` : ""}. Its scores alone are no proof of anything.</p>`;
  return about.roles.map((v) => html`<article class="role">
    <h3>${v.role} <${Verdict} verdict=${v.verdict} /></h3>
    <p>${v.claim}.</p>
    <p class="soft">${v.components.length === 1 ? "Tested alone: " : `One of ${v.components.length} heads tested together (number ${v.place} by ${v.method}): `}${v.components.map((c) => {
      const place = parseHead(c);
      return c === about.component || !place ? html`<b>${c}</b> ` : html`<a href=${headHref(...place)}>${c}</a> `;
    })}</p>
    <p>${v.reason}.</p>
    <dl class="proof">
      <dt>effect</dt><dd>${signed(v.effect)} ${v.metric}</dd>
      <dt>random heads</dt><dd>${signed(v.control_mean)} ± ${number(v.control_sd)}</dd>
      <dt>difference, 95 %</dt><dd>${signed(v.diff_ci_low)} … ${signed(v.diff_ci_high)}</dd>
      <dt>p</dt><dd>${number(v.p, 4)} (${v.n_seeds} prompts, ${v.n_controls} random sets)</dd>
      <dt>plain text</dt><dd>${v.side_effect === null ? "not measured" : `${signed(v.side_effect)} loss`}</dd>
    </dl>
    <div class="charts">
      ${v.dose.length > 1 && html`<figure><figcaption class="soft">More heads, more effect? <${Save} what=${`the proof of ${v.role}`} of=${{ of: "role", role: v.role, heads: v.components }} /></figcaption><${Dose} verdict=${v} /></figure>`}
      <figure><figcaption class="soft">Against random sets</figcaption><${Controls} verdict=${v} /></figure>
    </div>
  </article>`);
}

// The head alone against random heads, for any role: what turns a score into a claim that was tested.
function Test({ component, roles }) {
  const choices = useGet("/api/choices");
  const [role, setRole] = useState("");
  const [start, error] = useStart();
  const { jobs } = useJobs();
  if (!choices.value) return null;
  const chosen = role || choices.value.roles[0];
  const mine = jobs.find((job) => job.title === `Verify ${chosen} (${component})`);
  return html`<form class="row test" onSubmit=${(e) => (e.preventDefault(), start({ kind: "verify", role: chosen, heads: [component] }))}>
    <label>Test ${component} alone for <select value=${chosen} onChange=${(e) => setRole(e.target.value)}>${choices.value.roles.map((r) => html`<option>${r}</option>`)}</select></label>
    <button disabled=${mine && (mine.state === "queued" || mine.state === "running")}>Start</button>
    ${mine?.state === "queued" && html`<span class="soft">waiting</span>`}
    ${mine?.state === "running" && html`<${Progress} job=${mine} />`}
    ${mine?.result && html`<${Verdict} verdict=${mine.result.verdict} />`}
    ${mine?.result && !roles.some((v) => v.reason === mine.result.reason) && html`<span>${mine.result.reason}</span>`}
    <small class="soft">Against random heads of its layer; p is that of this one test.</small>
    ${(error || mine?.error) && html`<${Failure} error=${error || mine.error} />`}
  </form>`;
}

function OnPrompt({ layer, head, address, server }) {
  const prompt = address.get("prompt") || "";
  const [draft, setDraft] = useState(prompt || EXAMPLE);
  const [large, setLarge] = useState(false);
  const [ablated, setAblated] = useState(false);
  useEffect(() => {
    if (prompt) setDraft(prompt);
  }, [prompt]);
  const found = useAsk("/api/pattern", prompt ? { layer, head, prompt } : null);
  const tokens = found.value?.tokens;
  const look = useLook(address, tokens?.length || 0);
  const run = (event) => {
    event?.preventDefault();
    address.set({ prompt: draft, q: null, k: null });
  };
  return html`<section class="panel">
    <h2>On your prompt</h2>
    <form class="prompt" onSubmit=${run}>
      <textarea rows="2" aria-label="Prompt" maxlength="20000" spellcheck=${false} value=${draft} onInput=${(e) => setDraft(e.target.value)}
        onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && run(e)}></textarea>
      <button class="primary" title="Ctrl-Enter">Look</button>
    </form>
    ${!prompt && html`<p class="soft">Shows where this head looks, what it writes, and what is lost without it.${server?.state === "waiting" ? " The first look loads the model." : ""}</p>`}
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !found.value && html`<${Waiting}>${server?.state === "waiting" ? "Loading the model and looking …" : "Looking …"}<//>`}
    ${found.value && html`<div class=${found.stale ? "stale" : ""}>
      <div class=${large ? "" : "columns wide-left"}>
        <div>
          <h3>Where it looks <button class="plain small" onClick=${() => setLarge(!large)}>${large ? "smaller" : "enlarge"}</button></h3>
          <${Save} what="the attention" of=${{ of: "attention", layer, head, prompt: found.of.prompt, query: look.locked?.q, key: look.locked?.k, sink: look.first ? undefined : 0 }} />
          <${Attention} values=${found.value.values} tokens=${tokens} look=${look} large=${large} />
        </div>
        <div>
          <${Looked} values=${found.value.values} tokens=${tokens} look=${look} />
          <${Written} layer=${layer} head=${head} prompt=${found.of.prompt} query=${look.at} look=${look.key} tokens=${tokens} />
        </div>
      </div>
      <h3>Without it</h3>
      ${ablated
        ? html`<${Without} layer=${layer} head=${head} prompt=${prompt} />`
        : html`<p><button onClick=${() => setAblated(true)}>Switch it off now</button> <span class="soft">Sets its output to 0 at every position and compares the next token.</span></p>`}
    </div>`}
  </section>`;
}

function Written({ layer, head, prompt, query, look, tokens }) {
  const found = useAsk("/api/written", { layer, head, prompt, query, key: look });
  if (found.error) return html`<p class="soft">${found.error}</p>`;
  const from = look === null ? "" : html`, read from <${Token} text=${tokens[look]} />`;
  return html`<h3>What it writes there${from}</h3>
    <p class="soft">Directly, to the next token's logits (relative to the mean over the vocabulary).</p>
    ${found.value && html`<div class=${`pair ${found.stale ? "stale" : ""}`}>
      <${TokenTable} caption="raised" rows=${found.value.promoted} />
      <${TokenTable} caption="lowered" rows=${found.value.suppressed} />
    </div>`}`;
}

function Without({ layer, head, prompt }) {
  const theme = useTheme();
  const found = useAsk("/api/ablate", { layer, head, prompt });
  if (found.error) return html`<${Failure} error=${found.error} />`;
  if (!found.value) return html`<${Waiting}>Running without it …<//>`;
  const { tokens, kl } = found.value;
  return html`<div class=${found.stale ? "stale" : ""}>
    <p>The prediction moves by <b>${number(kl, 4)}</b> nats (KL of with from without).</p>
    <div class="scroll"><table class="ablate">
      <thead><tr><th>Next token</th><th class="n">with</th><th class="n">without</th><th class="n">change</th><th></th></tr></thead>
      <tbody>${tokens.map((row) => html`<tr>
        <td><${Token} text=${row.token} /></td><td class="n">${percent(row.before)}</td><td class="n">${percent(row.after)}</td>
        <td class="n">${row.after >= row.before ? "+" : "−"}${percent(Math.abs(row.after - row.before))}</td>
        <td class="twin"><i style=${{ width: `${120 * row.before}px`, background: css(0.35, theme) }}></i><i style=${{ width: `${120 * row.after}px`, background: css(row.after < row.before ? -0.55 : 0.7, theme) }}></i></td>
      </tr>`)}</tbody>
    </table></div></div>`;
}

// Texts in which the head writes most, each shaded by where it looks from there.
function Examples({ layer, head, address }) {
  const theme = useTheme();
  const on = address.get("examples") === "1";
  const found = useAsk("/api/examples", on ? { layer, head } : null);
  return html`<section class="panel">
    <h2>Where it acts most</h2>
    ${!on && html`<p><button onClick=${() => address.set({ examples: 1 })}>Look for examples</button> <span class="soft">Reads plain text and shows the places where its output is largest.</span></p>`}
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !found.value && html`<${Waiting}>Reading …<//>`}
    ${found.value && html`<p class="soft">The places of largest output in ${found.value.texts} pieces of plain text, ${found.value.length} tokens each; in the frame the token where it writes, shaded where it looks from there.</p>
      <ol class=${`examples ${found.stale ? "stale" : ""}`}>${found.value.examples.map((row) => html`<li>
        <a href=${hrefWith({ prompt: row.text, q: row.at, k: null })} title="Look at this text above">${number(row.factor, 1)} × its mean</a>
        <span class="shown">${row.tokens.slice(0, row.at + 6).map((token, i) => {
          const value = row.attention[i];
          return html`<span class=${i === row.at ? "query" : i > row.at ? "later" : ""} title=${i > row.at ? "later" : number(value, 3)}
            style=${i <= row.at && value > 0.01 ? { background: css(value, theme), color: strong(value, theme) ? "var(--on-strong)" : "var(--ink)" } : {}}>${visible(token)}</span>`;
        })}</span></li>`)}</ol>`}
  </section>`;
}

function ByWeights({ layer, head, address }) {
  const token = address.get("token") ?? "";
  const [draft, setDraft] = useState(token || " Mary");
  const found = useAsk("/api/copies", token ? { layer, head, token } : null);
  return html`<section class="panel">
    <h2>By its weights alone</h2>
    <p class="soft">What it would write for a token that it attends to (OV), and which tokens that token would look for (QK, without positions and biases). Embeddings in, unembedding out: no context.</p>
    <form class="row" onSubmit=${(e) => (e.preventDefault(), address.set({ token: draft }))}>
      <label>One token <input value=${draft} maxlength="100" size="14" spellcheck=${false} autocomplete="off" onInput=${(e) => setDraft(e.target.value)} /></label>
      <button>Look</button> <small class="soft">Mind the space in front: <code class="token">${visible(draft)}</code></small>
    </form>
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !found.value && html`<${Waiting}>Looking …<//>`}
    ${found.value && html`<div class=${`pair four ${found.stale ? "stale" : ""}`}>
      <${TokenTable} caption="OV raises" rows=${found.value.ov.promoted} head="score" />
      <${TokenTable} caption="OV lowers" rows=${found.value.ov.suppressed} head="score" />
      <${TokenTable} caption="looks for" rows=${found.value.qk.promoted} head="score" />
      <${TokenTable} caption="avoids" rows=${found.value.qk.suppressed} head="score" />
    </div>`}
  </section>`;
}
