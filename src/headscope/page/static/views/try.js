// What would the model do without this head, with half of that MLP, pushed in this direction? Edits, and both sides.
import { html, useEffect, useState } from "../lib/ui.js";
import { useAddress } from "../lib/address.js";
import { post, useAsk } from "../lib/api.js";
import { css } from "../lib/colour.js";
import { download } from "../lib/download.js";
import { useKeys } from "../lib/keys.js";
import { Failure, Token, Waiting } from "../lib/parts.js";
import { useQuiet } from "../lib/quiet.js";
import { useTheme } from "../lib/theme.js";
import { number, percent, signed, visible } from "../lib/text.js";

const EXAMPLE = "When Mary and John went to the store, John gave a drink to";
const NEW = {
  zero: { op: "zero", on: "" },
  scale: { op: "scale", on: "", by: 0.5 },
  steer: { op: "steer", layer: 0, strength: 0.1, word: "" },
};
const LENGTHS = [10, 20, 40, 64];

function editsOf(address) {
  try {
    const found = JSON.parse(address.get("edits") || "[]");
    return Array.isArray(found) ? found.filter((row) => row && typeof row === "object" && !Array.isArray(row)) : [];
  } catch {
    return []; // somebody cut the address short
  }
}

// An edit that says enough to be tried; the others wait for the reader.
const finished = (row) =>
  row.op === "kept" || (row.op === "steer" ? Number.isInteger(row.token) || (row.plus && row.minus) : String(row.on || "").trim() !== "");

export const TRY = { name: "Try", path: /^\/try$/, href: "/try", key: "t", does: "try edits", View: TryView };

function TryView({ server }) {
  const address = useAddress();
  const prompt = address.get("prompt") || "";
  const [draft, setDraft] = useState(prompt || EXAMPLE);
  const [wrong, setWrong] = useState(null);
  useEffect(() => {
    if (prompt) setDraft(prompt);
  }, [prompt]);
  const rows = editsOf(address);
  const put = (next, options) => address.set({ edits: next.length ? JSON.stringify(next) : null }, options);
  const change = (i, changes, options) => put(rows.map((row, j) => (j === i ? { ...row, ...changes } : row)), options);
  const add = (op) => put([...rows, NEW[op]]);
  const edits = rows.filter(finished);
  const body = prompt ? { prompt, edits } : null;
  const found = useAsk("/api/try/compare", body);
  const run = (event) => {
    event?.preventDefault();
    address.set({ prompt: draft });
  };
  const save = () => {
    setWrong(null);
    post("/api/try/save", { prompt, edits }).then(download, (failed) => setWrong(failed.message));
  };
  const load = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    setWrong(null);
    post("/api/try/load", { text: await file.text() }).then((told) => put([...rows, ...told.edits]), (failed) => setWrong(failed.message));
  };
  useKeys([
    { key: "z", does: "switch something off", run: () => add("zero") },
    { key: "x", does: "scale something", run: () => add("scale") },
    { key: "v", does: "steer", run: () => add("steer") },
  ]);

  return html`
    <header class="title"><h1>Try edits</h1><p class="soft">Switch heads, MLPs and neurons off, scale them, push the stream in a direction, and compare. The model itself stays as it is.</p></header>
    <section class="panel">
      <form class="prompt" onSubmit=${run}>
        <textarea rows="2" aria-label="Prompt" maxlength="20000" spellcheck=${false} value=${draft} onInput=${(e) => setDraft(e.target.value)}
          onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && run(e)}></textarea>
        <button class="primary" title="Ctrl-Enter">Try</button>
      </form>
      <h2>Edits</h2>
      <ol class="trial">${rows.map((row, i) => html`<${Row} key=${i} row=${row} words=${found.value?.words} change=${(changes, options) => change(i, changes, options)} remove=${() => put(rows.filter((_, j) => j !== i))} />`)}</ol>
      <div class="row">
        <button onClick=${() => add("zero")} title="z">Switch off</button><button onClick=${() => add("scale")} title="x">Scale</button><button onClick=${() => add("steer")} title="v">Steer</button>
        <span class="soft">·</span>
        <button onClick=${save} disabled=${!edits.length}>Save the edits</button>
        <label class="button file">Load edits <input type="file" accept=".json,application/json" aria-label="Load edits from a file" onChange=${load} /></label>
        ${rows.length > 0 && html`<button class="plain small" onClick=${() => put([])}>none</button>`}
      </div>
      ${!rows.length && html`<p class="soft">Name components as <code>L5H3</code>, <code>L3MLP</code>, <code>L7N1021</code>, several with commas, ranges as <code>L5H0-4</code>, <code>L2-4MLP</code>, <code>L6H*</code>. A saved file is read by <code>hs.load_edits</code>, <code>headscope edit show</code> and <code>headscope edit bake</code> (which writes switched-off and scaled parts into weights; steering has no weight to go to).</p>`}
      ${wrong && html`<${Failure} error=${wrong} />`}
    </section>
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !found.value && html`<${Waiting}>${server?.state === "waiting" ? "Loading the model and comparing …" : "Comparing …"}<//>`}
    ${found.value && !found.error && html`<div class=${found.stale ? "stale" : ""}><${Compared} told=${found.value} edited=${found.of.edits.some((row) => !row.off)} /></div>
      <${GoingOn} body=${body} />`}
  `;
}

// A text field that speaks when it is left or Enter is pressed.
function Text({ value, onChange, ...rest }) {
  const [draft, setDraft] = useState(value);
  useEffect(() => setDraft(value), [value]);
  const done = () => draft !== value && onChange(draft);
  return html`<input type="text" spellcheck=${false} autocomplete="off" ...${rest} value=${draft} onInput=${(e) => setDraft(e.target.value)} onBlur=${done} onKeyDown=${(e) => e.key === "Enter" && (e.preventDefault(), done())} />`;
}

// A slider with its number; it speaks when it rests.
function Slider({ value, onChange, min, max, step, label }) {
  const [slide, setSlide] = useState(value);
  useEffect(() => setSlide(value), [value]);
  const quiet = useQuiet(slide, 250);
  useEffect(() => {
    if (quiet === slide && quiet !== value && Number.isFinite(quiet)) onChange(quiet);
  }, [quiet]);
  return html`<input type="range" aria-label=${label} min=${min} max=${max} step=${step} value=${slide} onInput=${(e) => setSlide(Number(e.target.value))} />
    <input type="number" class="number" aria-label=${`${label}, as a number`} step="any" value=${slide} onInput=${(e) => e.target.value !== "" && setSlide(Number(e.target.value))} />`;
}

function Row({ row, words, change, remove }) {
  const [error, setError] = useState(null);
  const titles = { zero: "switch off", scale: "scale", steer: "steer", kept: "from a file" };
  const word = (text) => {
    setError(null);
    if (!text) return change({ word: "", token: undefined });
    post("/api/prompt/token", { text }).then((found) => change({ word: text, token: found.id }), (failed) => setError(failed.message));
  };
  const byToken = !("plus" in row);
  const at = row.at ?? null;
  return html`<li class=${row.off ? "off" : ""}>
    <label><input type="checkbox" checked=${!row.off} aria-label="In force" onChange=${(e) => change({ off: e.target.checked ? undefined : true })} /> <b>${titles[row.op] || row.op}</b></label>
    ${(row.op === "zero" || row.op === "scale") && html`<${Text} class="on" aria-label="Components" placeholder="L5H3, L3MLP, L7N1021" maxlength="2000" value=${row.on || ""} onChange=${(on) => change({ on })} />`}
    ${row.op === "scale" && html`<label>by <${Slider} label="Factor" min="-1" max="3" step="0.05" value=${row.by} onChange=${(by) => change({ by }, { replace: true })} /></label>`}
    ${row.op === "steer" && html`
      <label>the stream into layer <input type="number" class="number" min="0" aria-label="Layer" value=${row.layer} onChange=${(e) => change({ layer: Math.max(0, Math.round(Number(e.target.value)) || 0) })} /></label>
      <select aria-label="Direction" value=${byToken ? "token" : "difference"} onChange=${(e) => change(e.target.value === "token" ? { plus: undefined, minus: undefined, word: "", strength: 0.1 } : { token: undefined, word: undefined, plus: "", minus: "", strength: 1 })}>
        <option value="token" selected=${byToken}>towards a token</option><option value="difference" selected=${!byToken}>by the difference of two prompts</option></select>
      ${byToken ? html`<label><${Text} class="number" aria-label="Token" placeholder="␣Paris" maxlength="100" value=${row.word || ""} onChange=${word} /> ${row.word && html`<code class="token">${visible(row.word)}</code>`}</label>`
        : html`<label class="wide">from <${Text} class="steered" aria-label="Prompt to come from" placeholder="I hate this" maxlength="4000" value=${row.minus || ""} onChange=${(minus) => change({ minus })} /></label>
          <label class="wide">to <${Text} class="steered" aria-label="Prompt to go to" placeholder="I love this" maxlength="4000" value=${row.plus || ""} onChange=${(plus) => change({ plus })} /></label>`}
      <label>strength <${Slider} label="Strength" min=${byToken ? -1 : -4} max=${byToken ? 1 : 4} step=${byToken ? 0.02 : 0.1} value=${row.strength} onChange=${(strength) => change({ strength }, { replace: true })} /></label>`}
    ${row.op === "kept" && html`<code class="token">${String(row.says)}</code>`}
    ${row.op !== "kept" && html`<label>at <input type="number" class="number" min="0" max=${words ? words.length - 1 : null} placeholder="all" aria-label="Position; empty for all" value=${at ?? ""}
      onChange=${(e) => change({ at: e.target.value === "" ? undefined : Math.max(0, Math.round(Number(e.target.value)) || 0) })} /> ${at !== null && words?.[at] !== undefined && html`<${Token} text=${words[at]} />`}</label>`}
    <button class="plain remove" aria-label="Remove this edit" title="Remove" onClick=${remove}>×</button>
    ${!finished(row) && !error && html`<small class="soft">${row.op === "steer" ? "Say where to steer." : "Name the components."}</small>`}
    ${error && html`<${Failure} error=${error} />`}
  </li>`;
}

function Compared({ told, edited }) {
  const theme = useTheme();
  const most = Math.max(1e-9, ...told.tokens.map((row) => Math.abs(row.after - row.before)));
  const best = (side) => told.tokens.reduce((a, b) => (b[side] > a[side] ? b : a));
  const [first, then] = [best("before"), best("after")];
  return html`<section class="panel"><h2>Next token</h2>
    ${!edited ? html`<p class="soft">No edit is in force: both sides are the model as it is.</p>` : html`<p>
      <${Token} text=${first.token} /> ${percent(first.before)} ${first === then ? html`stays the best, now ${percent(then.after)}` : html`gives way to <${Token} text=${then.token} /> ${percent(then.after)}`}.
      The prediction moves by <b>${number(told.kl, 4)}</b> nats (KL of before from after).${" "}
      ${told.loss && html`The loss on the prompt goes from <b>${number(told.loss.before)}</b> to <b>${number(told.loss.after)}</b> nats a token (${signed(told.loss.after - told.loss.before)}).`}</p>
      <p class="soft small">${told.edits.join(" · ")}</p>`}
    <div class="scroll"><table class="compared"><thead><tr><th>Token</th><th class="n">before</th><th class="n">after</th><th class="n">change</th><th>less · more</th></tr></thead>
      <tbody>${told.tokens.map((row) => {
        const by = row.after - row.before;
        const long = (Math.abs(by) / most) * 50;
        return html`<tr><td><${Token} text=${row.token} /></td><td class="n">${percent(row.before)}</td><td class="n">${percent(row.after)}</td>
          <td class="n">${by >= 0 ? "+" : "−"}${percent(Math.abs(by))}</td>
          <td><span class="diverging"><i style=${{ left: `${by < 0 ? 50 - long : 50}%`, width: `${long}%`, background: css(by < 0 ? -0.6 : 0.6, theme) }}></i></span></td></tr>`;
      })}</tbody></table></div>
  </section>`;
}

function GoingOn({ body }) {
  const [n, setN] = useState(20);
  const [state, setState] = useState({});
  const text = JSON.stringify({ ...body, n });
  const go = () => {
    setState({ loading: true });
    post("/api/try/continue", JSON.parse(text)).then((value) => setState({ value, text }), (failed) => setState({ error: failed.message }));
  };
  const { value, error, loading } = state;
  const side = (name, other) => html`<div><h3>${name === "before" ? "As it is" : "With the edits"}</h3>
    <p class="continuation">${value[name].map((token, i) => html`<span class=${token !== other[i] ? "differs" : ""}>${token}</span>`)}${value[name].length === 0 && html`<span class="soft">(it ends at once)</span>`}</p></div>`;
  return html`<section class="panel"><h2>How it goes on</h2>
    <div class="row"><button onClick=${go} disabled=${loading}>Go on</button>
      <label class="soft">by <select value=${n} onChange=${(e) => setN(Number(e.target.value))}>${LENGTHS.map((length) => html`<option value=${length} selected=${length === n}>${length}</option>`)}</select> tokens, always the best one</label>
      ${value && state.text !== text && html`<span class="soft">Below is an earlier answer; go on again for the present edits.</span>`}</div>
    ${loading && html`<${Waiting}>Writing both …<//>`}
    ${error && html`<${Failure} error=${error} />`}
    ${value && html`<div class=${`sides ${state.text === text ? "" : "stale"}`}>${side("before", value.after)}${side("after", value.before)}</div>`}
  </section>`;
}
