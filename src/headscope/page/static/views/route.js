// The route of one prediction: its graph, what is locked in it, its proof, and its files.
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { hrefWith } from "../lib/address.js";
import { post, useAsk } from "../lib/api.js";
import { css, limit } from "../lib/colour.js";
import { grouped } from "../lib/layout.js";
import { Failure, Scale, Token, TokenTable, Waiting } from "../lib/parts.js";
import { useQuiet } from "../lib/quiet.js";
import { RouteGraph, signedLimit } from "../lib/route.js";
import { Save } from "../lib/save.js";
import { useTheme } from "../lib/theme.js";
import { number, parseHead, percent, signed } from "../lib/text.js";
import { Progress, refresh, useJobs } from "./runs.js";

const THRESHOLD = 0.04;
const [LOW, HIGH] = [0.005, 0.4]; // ends of the slider, which is logarithmic
const place = (share) => Math.round(Math.log10(share / LOW) * 100);
const share = (at) => Number((LOW * 10 ** (at / 100)).toPrecision(2));
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

export function RoutePanel({ question, told, address }) {
  const [slide, setSlide] = useState(question.threshold);
  useEffect(() => setSlide(question.threshold), [question.threshold]);
  const quiet = useQuiet(slide, 300);
  useEffect(() => {
    if (quiet === slide && quiet !== question.threshold) address.set({ threshold: quiet === THRESHOLD ? null : quiet }, { replace: true });
  }, [quiet]);
  // a smaller threshold changes all weights, since those that are left are made to sum to 1: only the server can tell
  const found = useAsk("/api/prompt/route", question);
  const route = found.value;
  const on = address.get("on");
  const lock = (id) => address.set({ on: id === on ? null : id });
  return html`<section class="panel">
    <h2>Route ${route && html`to <${Token} text=${route.target} />${route.foil !== null && html` rather than <${Token} text=${route.foil} />`}`}</h2>
    <div class="row dials">
      <label>Parts above <input type="range" aria-label="Threshold" min="0" max=${place(HIGH)} step="2" value=${place(slide)} aria-valuetext=${`${(100 * slide).toPrecision(2)} percent`}
        onInput=${(e) => setSlide(share(Number(e.target.value)))} /> <b>${Number((100 * slide).toPrecision(2))} %</b></label>
      <label class="soft">Biases <select value=${question.biases} onChange=${(e) => address.set({ biases: e.target.value === "part" ? null : e.target.value, on: null })}>
        ${[["part", "on their own"], ["heads", "in the heads"], ["drop", "left out"]].map(([name, says]) => html`<option value=${name} selected=${name === question.biases}>${says}</option>`)}</select></label>
      <${Save} what="the route" of=${{ of: "route", ...question }} more=${[{ says: "Neuronpedia", url: "/api/prompt/neuronpedia", body: question }]} />
    </div>
    ${route && html`<${Counts} route=${route} waiting=${found.stale || slide !== question.threshold} />`}
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${found.loading && !route && html`<${Waiting}>Finding the route …<//>`}
    ${route && html`<div class=${`columns route ${found.stale ? "stale" : ""}`}>
      <div>
        <${RouteGraph} route=${route} tokens=${route.tokens} locked=${on} onLock=${lock} />
        <p><${Scale} most=${signedLimit(route)} low=${-1} />
          <span class="soft">to ${route.foil === null ? "the target’s logit" : "target − foil"}; red is dashed, too; a few edges lie beyond the ends. Width: share of the state above. Grey: the stream itself. Dots are states of the stream, squares MLPs.</span></p>
        <p class="soft">Shares say what a state is made of, not what would happen without it: prove it.</p>
        <${Proof} question=${question} />
      </div>
      <div><${Detail} id=${on} route=${route} told=${told} question=${question} /><${Heads} route=${route} told=${told} on=${on} onLock=${lock} /></div>
    </div>`}
  </section>`;
}

function Counts({ route, waiting }) {
  const total = route.tokens.length;
  const heads = route.edges.filter((e) => e.kind === "head").length;
  const mlps = route.nodes.filter((node) => node.kind === "mlp").length;
  const columns = new Set(route.nodes.map((node) => node.position)).size;
  return html`<p class="soft counts" aria-live="polite"><b>${heads.toLocaleString("en")}</b> of ${count(route.parts, "edge")} of heads into the states that are reached, ${count(mlps, "MLP")}, ${count(route.nodes.length, "state")}
    ${columns < total && html` · ${total - columns} of ${total} tokens are not reached and not drawn`}${waiting && " · finding the new one …"}</p>`;
}

function Proof({ question }) {
  const { jobs } = useJobs();
  const [error, setError] = useState(null);
  const key = JSON.stringify(question);
  const [started, setStarted] = useState({});
  const done = jobs.find((job) => job.kind === "prove" && job.result?.question && same(job.result.question, question));
  const job = done || jobs.find((other) => other.id === started[key]);
  const start = () => {
    setError(null);
    post("/api/prompt/prove", question).then((job) => (setStarted({ ...started, [key]: job.id }), refresh()), (failed) => setError(failed.message));
  };
  const proof = job?.result?.proof;
  if (!proof)
    return html`<div class="row"><button onClick=${start} disabled=${job && (job.state === "queued" || job.state === "running")}>Prove it</button>
      ${job?.state === "running" ? html`<${Progress} job=${job} />` : job?.state === "queued" ? html`<span class="soft">It waits for its turn.</span>` : html`<span class="soft">Cuts everything else, and everything but random routes of the same size.</span>`}
      ${job?.error && html`<${Failure} error=${job.error} />`}${error && html`<${Failure} error=${error} />`}</div>`;
  const part = (x) => `${Math.round(100 * x)} %`;
  const metric = proof.metric === "logit_diff" ? "difference of the logits" : "loss’s gain";
  return html`<div class="proved" role="status">
    <p>With all but this route cut, <b>${part(proof.faithfulness)}</b> of the ${metric} is left; with ${proof.n_random} random routes of as many edges in each layer <b>${part(proof.random)} ± ${part(proof.random_sd)}</b>, at best ${part(proof.random_most)}.
      With the route cut and all else kept, ${part(proof.complement)} is left.</p>
    <p class="soft">0 % is the model with every edge cut (heads and MLPs give their means on plain text), 100 % the model as it is. The route keeps ${count(Math.round(proof.n_edges), "edge")}, ${percent(proof.share)} of all. One prompt is no proof of a rule: a task of several is one (<code>headscope routes --task</code>).</p>
  </div>`;
}

const same = (a, b) => ["prompt", "position", "target", "foil", "threshold", "biases"].every((name) => a[name] === b[name]) && a.more.join() === b.more.join();

const positions = (edge) => [edge.source, edge.target].map((id) => Number(id.split("@")[1]));

function HeadLink({ edge, told }) {
  const [layer, head] = parseHead(edge.component);
  const [k, q] = positions(edge);
  return html`<a href=${hrefWith({ prompt: told.text, q, k }, `/head/${layer}/${head}`, "")}>${edge.component}</a>`;
}

const without = (component, told) => hrefWith({ prompt: told.text, edits: JSON.stringify([{ op: "zero", on: component }]) }, "/try", "");

function SignedBar({ value, most }) {
  const theme = useTheme();
  return html`<span class="bar" style=${{ width: `${(Math.abs(value) / most) * 34}px`, background: css(value < 0 ? -0.55 : 0.55, theme) }}></span> ${signed(value)}`;
}

function Detail({ id, route, told, question }) {
  const edge = useMemo(() => (id ? grouped(route).find((e) => e.id === id) : null), [id, route]);
  const node = route.nodes.find((n) => n.id === id);
  if (!id) return html`<p class="soft detail">Click an edge for its heads, an MLP for its neurons, a state for what it would predict.</p>`;
  if (!edge && !node) return html`<p class="soft detail"><b>${id}</b> is not on the route at this threshold.</p>`;
  if (node?.kind === "mlp") return html`<${Neurons} node=${node} route=${route} told=${told} question=${question} />`;
  if (node && node.kind !== "bias") return html`<${State} node=${node} route=${route} told=${told} question=${question} />`;
  if (node) return html`<article class="detail"><h3>Biases of layer ${node.layer}’s attention</h3><p class="soft">A constant: it depends on no token.</p></article>`;
  if (edge.kind === "head") return html`<${EdgeHeads} edge=${edge} route=${route} told=${told} />`;
  return html`<article class="detail"><h3>${edge.source} → ${edge.target}</h3>
    <p>${edge.kind === "input" ? "What the MLP read; it has one input." : html`<b>${percent(edge.weight)}</b> of the state, <b>${signed(edge.signed)}</b> to the logit.`}</p></article>`;
}

function EdgeHeads({ edge, route, told }) {
  const [k, q] = positions(edge);
  const most = limit(edge.parts.map((part) => part.signed));
  const [layer, head] = parseHead(edge.parts[0].component);
  const wrote = useAsk("/api/written", { layer, head, prompt: told.text, query: q, key: k });
  return html`<article class="detail">
    <h3><${Token} text=${route.tokens[q]} /> <small class="soft">${q}</small> ← <${Token} text=${route.tokens[k]} /> <small class="soft">${k}</small></h3>
    <table class="heads-of"><thead><tr><th>Head</th><th class="n">share</th><th class="n">to the logit</th><th></th></tr></thead><tbody>
      ${edge.parts.map((part) => html`<tr><td><${HeadLink} edge=${part} told=${told} /></td><td class="n">${percent(part.weight)}</td>
        <td class="n"><${SignedBar} value=${part.signed} most=${most} /></td><td><a class="small" href=${without(part.component, told)}>without it</a></td></tr>`)}
    </tbody></table>
    ${wrote.value && !wrote.stale && html`<p class="soft">What ${edge.parts[0].component} wrote from there, directly to the next token’s logits at ${q}:</p>
      <div class="pair"><${TokenTable} caption="raises" rows=${wrote.value.promoted.slice(0, 6)} /><${TokenTable} caption="lowers" rows=${wrote.value.suppressed.slice(0, 6)} /></div>`}
  </article>`;
}

function Neurons({ node, route, told, question }) {
  const found = useAsk("/api/prompt/neurons", { ...question, layer: node.layer, at: node.position });
  const rows = found.value?.neurons;
  const words = (list) => list?.map((t) => html`<${Token} text=${t.token} /> `);
  return html`<article class="detail"><h3>MLP of layer ${node.layer} <small class="soft">at <${Token} text=${route.tokens[node.position]} /> ${node.position} · <a href=${without(`L${node.layer}MLP`, told)}>without it</a></small></h3>
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${!rows && found.loading && html`<${Waiting}>Naming its neurons …<//>`}
    ${rows && html`<div class=${`scroll ${found.stale ? "stale" : ""}`}><table class="neurons"><thead><tr><th>Neuron</th><th class="n">act.</th><th class="n">share</th><th class="n">logit</th><th>raises · lowers</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr><td><a href=${without(row.component, told)} title="What happens without it">${row.component}</a></td><td class="n">${number(row.activation, 2)}</td><td class="n">${percent(row.weight)}</td><td class=${`n ${row.signed < 0 ? "down" : "up"}`}>${signed(row.signed)}</td>
        <td>${words(row.promoted?.slice(0, 3))}<span class="soft">·</span> ${words(row.suppressed?.slice(0, 2))}</td></tr>`)}</tbody></table></div>
      <p class="soft">The ${rows.length} with the largest shares of the state after the MLP.</p>`}
  </article>`;
}

function State({ node, route, told, question }) {
  const found = useAsk("/api/prompt/state", { ...question, node: node.id });
  const state = found.value;
  const into = route.edges.filter((e) => e.target === node.id).sort((a, b) => b.weight - a.weight);
  const moved = (row) => {
    const by = row.below === null ? 0 : row.below - row.rank;
    return by === 0 ? html`<span class="soft">=</span>` : html`<span class=${by > 0 ? "up" : "down"}>${by > 0 ? "↑" : "↓"} ${Math.abs(by).toLocaleString("en")}</span>`;
  };
  const line = (row, is) => html`<tr class=${is ? "told" : ""}><td><${Token} text=${row.token} /> ${is && html`<small class="soft">${is}</small>`}</td><td class="n">${percent(row.p)}</td><td class="n">${row.rank.toLocaleString("en")}</td><td class="n">${moved(row)}</td></tr>`;
  const name = (row) => (row.id === state.target.id ? "target" : row.id === state.foil?.id ? "foil" : "");
  return html`<article class="detail"><h3>${node.kind === "embed" ? "Embedding" : node.kind === "mid" ? `After layer ${node.layer}’s attention` : `After layer ${node.layer}`} <small class="soft">at <${Token} text=${route.tokens[node.position]} /> ${node.position}</small></h3>
    ${into.length > 0 && html`<p class="soft">Made of ${into.slice(0, 5).map((e) => `${e.component || (e.kind === "residual" ? e.source : e.kind)} ${percent(e.weight)}`).join(", ")}${into.length > 5 ? ` and ${into.length - 5} more` : ""}.</p>`}
    ${found.error && html`<${Failure} error=${found.error} />`}
    ${!state && found.loading && html`<${Waiting}>Reading the state …<//>`}
    ${state && html`<div class=${found.stale ? "stale" : ""}>
      <table><thead><tr><th>Would predict</th><th class="n">probability</th><th class="n">rank</th><th class="n">${state.below === null ? "" : `against ${state.below.split("@")[0]}`}</th></tr></thead>
        <tbody>${state.top.slice(0, 8).map((row) => line(row, name(row)))}
          ${[state.target, state.foil].filter((row) => row && !state.top.slice(0, 8).some((other) => other.id === row.id)).map((row) => line(row, name(row)))}</tbody></table>
      ${state.promoted.length > 0 && html`<p class="soft">What was added since ${state.below.split("@")[0]}, directly in logits:</p>
        <div class="pair"><${TokenTable} caption="raises" rows=${state.promoted.slice(0, 5)} /><${TokenTable} caption="lowers" rows=${state.suppressed.slice(0, 5)} /></div>`}
    </div>`}
  </article>`;
}

const MOST_ROWS = 40;

function Heads({ route, told, on, onLock }) {
  const edges = useMemo(() => route.edges.filter((e) => e.kind === "head").sort((a, b) => b.weight - a.weight), [route]);
  if (!edges.length) return html`<p class="soft">No head has a part above the threshold.</p>`;
  const most = limit(edges.map((e) => e.signed));
  return html`<h3>Heads on the route</h3><div class="scroll tall"><table>
    <thead><tr><th>Head</th><th>at ← reads</th><th class="n">share</th><th class="n">to the logit</th></tr></thead>
    <tbody>${edges.slice(0, MOST_ROWS).map((edge) => {
      const [k, q] = positions(edge);
      const id = `${edge.source}>${edge.target}`;
      return html`<tr key=${id + edge.component} class=${id === on ? "told" : ""}>
        <td><button class="plain link" aria-pressed=${id === on} onClick=${() => onLock(id)}>${edge.component}</button></td>
        <td><${Token} text=${route.tokens[q]} /> ← <${Token} text=${route.tokens[k]} /></td>
        <td class="n">${percent(edge.weight)}</td><td class="n"><${SignedBar} value=${edge.signed} most=${most} /></td></tr>`;
    })}</tbody></table></div>
    ${edges.length > MOST_ROWS && html`<p class="soft">and ${edges.length - MOST_ROWS} smaller ones; they are in the graph and the saved files.</p>`}`;
}
