// One prompt: its tokens, what comes next, what each layer would say (logit lens), and how the prediction came about.
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { hrefWith, useAddress } from "../lib/address.js";
import { useAsk } from "../lib/api.js";
import { css, limit } from "../lib/colour.js";
import { Graph, edgeId } from "../lib/graph.js";
import { useKeys } from "../lib/keys.js";
import { Failure, Scale, Token, TokenTable, Waiting } from "../lib/parts.js";
import { useTheme } from "../lib/theme.js";
import { number, parseHead, percent, signed, visible } from "../lib/text.js";

const EXAMPLE = "The capital of France is";
const THRESHOLD = 0.04;

// A value that follows another once it has been quiet for a while: a slider asks when it rests.
function useQuiet(value, ms) {
  const [quiet, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return quiet;
}

export function PromptView({ server }) {
  const address = useAddress();
  const prompt = address.get("prompt") || "";
  const [draft, setDraft] = useState(prompt || EXAMPLE);
  const [target, setTarget] = useState(address.get("target") || "");
  const [foil, setFoil] = useState(address.get("foil") || "");
  useEffect(() => {
    if (prompt) setDraft(prompt);
    setTarget(address.get("target") || "");
    setFoil(address.get("foil") || "");
  }, [location.search]);
  const at = /^\d+$/.test(address.get("at") || "") ? Number(address.get("at")) : null;
  // the table that holds the chosen position: the last one unless it lies before
  const first = /^\d+$/.test(address.get("first") || "") ? Number(address.get("first")) : null;
  const found = useAsk("/api/prompt", prompt ? { prompt, first } : null);
  const run = (event) => {
    event?.preventDefault();
    const same = draft === prompt;
    address.set({ prompt: draft, target, foil, on: null, ...(same ? {} : { at: null, first: null }) });
  };
  const tokens = found.value?.tokens;
  const position = tokens && (at !== null && at < tokens.length ? at : tokens.length - 1);
  useKeys([
    { key: "ArrowLeft", does: "the token before", run: () => tokens && position > 0 && address.set({ at: position - 1, on: null }) },
    { key: "ArrowRight", does: "the next token", run: () => tokens && position < tokens.length - 1 && address.set({ at: position + 1, on: null }) },
    { key: "Escape", does: "release what is locked", run: () => (address.get("on") ? address.set({ on: null }) : false) },
  ]);

  return html`
    <header class="title"><h1>How a prediction comes about</h1></header>
    <section class="panel">
      <form class="prompt" onSubmit=${run}>
        <textarea rows="2" aria-label="Prompt" maxlength="20000" spellcheck=${false} value=${draft} onInput=${(e) => setDraft(e.target.value)}
          onKeyDown=${(e) => e.key === "Enter" && (e.ctrlKey || e.metaKey) && run(e)}></textarea>
        <div class="goal">
          <label>Why <input value=${target} placeholder="its own choice" size="12" maxlength="60" spellcheck=${false} autocomplete="off" onInput=${(e) => setTarget(e.target.value)} /></label>
          <label>and not <input value=${foil} placeholder="(nothing)" size="12" maxlength="60" spellcheck=${false} autocomplete="off" onInput=${(e) => setFoil(e.target.value)} /></label>
        </div>
        <button class="primary" title="Ctrl-Enter">Look</button>
      </form>
      ${!prompt && html`<p class="soft">Shows what comes next, what each layer would say, and the route by which the prediction came about.${server?.state === "waiting" ? " The first look loads the model." : ""}</p>`}
      ${found.error && html`<${Failure} error=${found.error} />`}
      ${found.loading && !found.value && html`<${Waiting}>Looking …<//>`}
      ${found.value && html`<${Tokens} tokens=${tokens} position=${position} onChoose=${(p) => address.set({ at: p, on: null })} />`}
    </section>
    ${found.value && html`
      <div class=${`columns next ${found.stale ? "stale" : ""}`}>
        <${Next} value=${found.value} position=${position} address=${address} />
        <${Lens} value=${found.value} position=${position} address=${address} />
      </div>
      <${RoutePanel} prompt=${found.of.prompt} position=${position} address=${address} />`}
  `;
}

function Tokens({ tokens, position, onChoose }) {
  return html`<p class="looked tokens-row">${tokens.map((token, i) => html`<button key=${i} class=${i === position ? "query" : ""} aria-pressed=${i === position} title=${`position ${i}`} onClick=${() => onChoose(i)}>${visible(token)}</button>`)}</p>
    <p class="soft">${tokens.length} tokens; what follows is about the one in the frame. Click another, or walk with ← and →.</p>`;
}

function Next({ value, position, address }) {
  const theme = useTheme();
  const rows = value.next[position - value.first];
  const most = rows ? rows[0].p : 1;
  return html`<section class="panel"><h2>After <${Token} text=${value.tokens[position]} /></h2>
    ${rows ? html`<table class="tokens"><caption>the model's next tokens; choose one to explain it</caption><tbody>${rows.map((row) => html`<tr>
      <td><a href=${hrefWith({ target: row.token, on: null })}><${Token} text=${row.token} /></a></td>
      <td class="n"><span class="bar" style=${{ width: `${(row.p / most) * 70}px`, background: css(0.55, theme) }}></span> ${percent(row.p)}</td></tr>`)}</tbody></table>`
    : html`<p class="soft">Position ${position} is outside the table. <button onClick=${() => address.set({ first: Math.max(0, position - 5) })}>Move the table there</button></p>`}
  </section>`;
}

function Lens({ value, position, address }) {
  const theme = useTheme();
  const n = value.rows[0].tokens.length;
  const [from, to] = [value.first, value.first + n];
  const total = value.tokens.length;
  const cells = [...value.rows].reverse();
  return html`<section class="panel"><h2>Logit lens</h2>
    <p class="soft">What each layer's stream would predict, if it were the last. The stronger the colour, the more probable.
      ${n < total && html` Positions ${from} to ${to - 1} of ${total}.
        <button class="small" disabled=${from === 0} onClick=${() => address.set({ first: Math.max(0, from - n) })}>earlier</button>
        <button class="small" disabled=${to >= total} onClick=${() => address.set({ first: Math.min(total - 1, to) })}>later</button>`}</p>
    <div class="scroll lens" tabindex="0" role="region" aria-label="Logit lens"><table>
      <thead><tr><th></th>${value.tokens.slice(from, to).map((t, i) => html`<th class=${from + i === position ? "at" : ""}>${visible(t)}</th>`)}</tr></thead>
      <tbody>${cells.map((row) => html`<tr><th>L${row.layer}</th>${row.tokens.map((t, i) => {
        const p = row.probs[i];
        return html`<td class=${from + i === position ? "at" : ""} title=${`L${row.layer} after ${visible(value.tokens[from + i])}: ${visible(t)} ${percent(p)}`}
          style=${{ background: css(p, theme), color: p > 0.45 ? "var(--on-strong)" : "var(--ink)" }}>${visible(t)}</td>`;
      })}</tr>`)}</tbody>
    </table></div>
  </section>`;
}

function RoutePanel({ prompt, position, address }) {
  const given = Number(address.get("threshold") || THRESHOLD);
  const [slide, setSlide] = useState(given);
  useEffect(() => setSlide(given), [given]);
  const threshold = useQuiet(slide, 250);
  const [target, foil] = ["target", "foil"].map((name) => address.get(name) || null);
  const found = useAsk("/api/route", { prompt, position, target, foil, threshold });
  useEffect(() => {
    if (threshold !== given) address.set({ threshold: threshold === THRESHOLD ? null : threshold }, { replace: true });
  }, [threshold]);
  const [hovered, setHovered] = useState(null);
  const locked = address.get("on");
  const lock = (id) => address.set({ on: id === locked ? null : id });
  const route = found.value;
  const heads = useMemo(() => (route ? route.edges.filter((e) => e.kind === "head").sort((a, b) => b.weight - a.weight) : []), [route]);
  return html`<section class="panel">
    <h2>Route ${route && html`to <${Token} text=${route.target} />${route.foil !== null && html` rather than <${Token} text=${route.foil} />`}`}</h2>
    <div class="row">
      <label>Parts above <input type="range" min="0.01" max="0.2" step="0.005" value=${slide} aria-valuetext=${`${(100 * slide).toFixed(1)} percent`}
        onInput=${(e) => setSlide(Number(e.target.value))} /> <b>${(100 * slide).toFixed(1)} %</b></label>
      ${route && html`<span class="soft" aria-live="polite">${route.nodes.length} nodes, ${route.edges.length} edges, ${heads.length} of them by heads; of ${route.parts.toLocaleString("en")} edges of heads into these nodes the others are smaller</span>`}
    </div>
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !route && html`<${Waiting}>Finding the route …<//>`}
    ${route && html`<div class=${`columns route ${found.stale ? "stale" : ""}`}>
      <div>
        <${Graph} route=${route} hovered=${hovered} locked=${locked} onHover=${setHovered} onLock=${lock} />
        <p class="soft">Thickness: share of the state that it makes up. Blue adds to the logit of the target${route.foil !== null ? " minus the foil's" : ""}, red and dashed takes away. Circles are states of the stream, squares MLPs. Ctrl-wheel zooms, drag moves.</p>
        <p class="soft">Shares say what a state is made of, not what happens without it: switch heads off on their page, or prove the route with <code>headscope routes --prove</code>.</p>
      </div>
      <div><${Detail} route=${route} id=${hovered || locked} settled=${locked} /><${RouteHeads} route=${route} heads=${heads} told=${hovered || locked} onHover=${setHovered} onLock=${lock} /></div>
    </div>`}
  </section>`;
}

const places = (edge) => [edge.source, edge.target].map((id) => Number(id.split("@")[1]));

function headLink(route, edge, text) {
  const place = parseHead(edge.component);
  const [key, query] = places(edge);
  return html`<a href=${hrefWith({ prompt: route.prompt, q: query, k: key }, `/head/${place[0]}/${place[1]}`, "")}>${text}</a>`;
}

function RouteHeads({ route, heads, told, onHover, onLock }) {
  const theme = useTheme();
  if (!heads.length) return html`<p class="soft">No head has a part above the threshold.</p>`;
  const most = limit(heads.map((e) => e.signed));
  return html`<h3>Heads on the route</h3><div class="scroll tall"><table class="scores">
    <thead><tr><th>Head</th><th>reads</th><th>at</th><th class="n">share</th><th class="n">to the logit</th></tr></thead>
    <tbody>${heads.slice(0, 60).map((edge) => {
      const [key, query] = places(edge);
      const id = edgeId(edge);
      return html`<tr key=${id} class=${id === told ? "told" : ""} onPointerEnter=${() => onHover(id)} onPointerLeave=${() => onHover(null)}>
        <td><button class="plain link" aria-pressed=${id === told} onClick=${() => onLock(id)}>${edge.component}</button></td>
        <td><${Token} text=${route.tokens[key]} /></td><td><${Token} text=${route.tokens[query]} /></td>
        <td class="n">${number(edge.weight)}</td>
        <td class="n"><span class="bar" style=${{ width: `${(Math.abs(edge.signed) / most) * 34}px`, background: css(edge.signed < 0 ? -0.55 : 0.55, theme) }}></span> ${signed(edge.signed, 2)}</td></tr>`;
    })}</tbody></table></div>
    ${heads.length > 60 && html`<p class="soft">and ${heads.length - 60} smaller ones.</p>`}`;
}

function Detail({ route, id, settled }) {
  const edge = route.edges.find((e) => edgeId(e) === id);
  const node = route.nodes.find((n) => n.id === id);
  if (edge) {
    const [key, query] = places(edge);
    const same = route.edges.filter((e) => e.kind === "head" && e.source === edge.source && e.target === edge.target);
    return html`<article class="detail">
      <h3>${edge.kind === "head" ? headLink(route, edge, edge.component) : edge.component || edge.kind}
        ${" "}<small class="soft">${edge.source} → ${edge.target}</small></h3>
      <p>${edge.kind === "head" ? html`reads <${Token} text=${route.tokens[key]} /> (${key}) at <${Token} text=${route.tokens[query]} /> (${query}): ` : ""}
        <b>${percent(edge.weight)}</b> of the state, <b>${signed(edge.signed, 3)}</b> to the logit.</p>
      ${same.length > 1 && html`<p class="soft">All heads on this way: ${same.map((e) => html`${headLink(route, e, e.component)} ${number(e.weight, 2)} `)}</p>`}
      ${edge.kind === "head" && settled === id && html`<${Wrote} route=${route} edge=${edge} />`}
    </article>`;
  }
  if (node) {
    const neurons = route.neurons.filter((n) => n.node === id);
    const into = route.edges.filter((e) => e.target === id).sort((a, b) => b.weight - a.weight);
    return html`<article class="detail">
      <h3>${node.kind === "mlp" ? `MLP of layer ${node.layer}` : node.kind === "embed" ? "Embedding" : `Stream ${node.id.split("@")[0]}`} <small class="soft">at <${Token} text=${node.token ?? route.tokens[node.position]} /> (${node.position})</small></h3>
      ${into.length > 0 && html`<p class="soft">Made of ${into.slice(0, 6).map((e) => `${e.component || e.kind} ${number(e.weight, 2)}`).join(", ")}${into.length > 6 ? ` and ${into.length - 6} more` : ""}.</p>`}
      ${neurons.length > 0 && html`<table class="scores"><thead><tr><th>Neuron</th><th class="n">activation</th><th class="n">share</th><th class="n">to the logit</th></tr></thead>
        <tbody>${neurons.map((n) => html`<tr><td>${n.component}</td><td class="n">${number(n.activation, 2)}</td><td class="n">${number(n.weight)}</td><td class="n">${signed(n.signed, 2)}</td></tr>`)}</tbody></table>`}
    </article>`;
  }
  return html`<p class="soft detail">Hover an edge or a node; click locks it, click again or Esc releases.</p>`;
}

function Wrote({ route, edge }) {
  const [layer, head] = parseHead(edge.component);
  const [key, query] = places(edge);
  const found = useAsk("/api/written", { layer, head, prompt: route.prompt, query, key });
  if (found.error) return html`<p class="soft">${found.error}</p>`;
  return found.value ? html`<div class="pair"><${TokenTable} caption="raises directly" rows=${found.value.promoted.slice(0, 6)} /><${TokenTable} caption="lowers directly" rows=${found.value.suppressed.slice(0, 6)} /></div>` : null;
}
