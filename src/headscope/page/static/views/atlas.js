// The atlas: one method's scores over all heads or neurons, or two compared; the roles and what became of them.
import { html, useMemo, useState } from "../lib/ui.js";
import { go, headHref, hrefWith, useAddress } from "../lib/address.js";
import { useGet } from "../lib/api.js";
import { Heat } from "../lib/heat.js";
import { useKeys } from "../lib/keys.js";
import { Chart, Failure, SIGNS, Scale, Verdict, Waiting } from "../lib/parts.js";
import { css, limit } from "../lib/colour.js";
import { Save } from "../lib/save.js";
import { useTheme } from "../lib/theme.js";
import { name, number, parseHead, signed } from "../lib/text.js";
import { AtWork } from "./at-work.js";
import { Neurons, scoresNeurons } from "./neurons.js";
import { StartScan } from "./runs.js";

const VERDICTS = ["supported", "inconclusive", "not supported"];

// the grid itself acts on them
const GRID_KEYS = [
  { key: "← → ↑ ↓", does: "walk over the heads (in the grid)", run: () => false },
  { key: "Space", does: "lock the head (in the grid)", run: () => false },
  { key: "Enter", does: "open the head (in the grid)", run: () => false },
];

export const ATLAS = { name: "Atlas", path: /^\/$/, href: "/", key: "a", does: "the atlas", View: AtlasView };

function AtlasView({ server }) {
  const atlas = useGet("/api/atlas"); // not after /api/state: it is what the first paint waits for
  if (atlas.value === null && server) return html`<${NoAtlas} server=${server} />`;
  if (atlas.error) return html`<${Failure} error=${atlas.error} />`;
  if (!atlas.value) return html`<${Waiting} />`;
  return html`<${Loaded} atlas=${atlas.value} />`;
}

function NoAtlas({ server }) {
  return html`<section class="panel narrow">
    <h1>No atlas of ${server.model} yet</h1>
    <p>A scan scores every head with each method and tests the roles by intervention. The quick one takes a few minutes.</p>
    <${StartScan} />
  </section>`;
}

function Loaded({ atlas }) {
  const address = useAddress();
  const { n_layers: layers, n_heads: heads } = atlas.model.anatomy;
  const drawn = atlas.methods.filter((m) => m.dims.join() === "layer,head" && m.shape[0] === layers && m.shape[1] === heads);
  const ofNeurons = atlas.methods.filter(scoresNeurons);
  const every = [...drawn, ...ofNeurons];
  const asked = address.get("method");
  // what was proved is the first thing to see
  const proved = atlas.verdicts.find((v) => v.verdict === "supported");
  const method = every.find((m) => m.id === asked) || every.find((m) => m.id === proved?.method) || every[0];
  const neuronal = !!method && scoresNeurons(method);
  const peers = (neuronal ? ofNeurons : drawn).filter((m) => m !== method);
  const other = peers.find((m) => m.id === address.get("vs")) || null;
  const [hovered, setHovered] = useState(null);
  const lockedAt = parseHead(address.get("at") || "");
  const locked = lockedAt && lockedAt[0] < layers && lockedAt[1] < heads ? lockedAt[0] * heads + lockedAt[1] : null;
  const show = address.get("show") || "";

  const index = (component) => {
    const place = parseHead(component);
    return place && place[0] * heads + place[1];
  };
  const rolesOf = useMemo(() => {
    const found = new Map();
    for (const v of atlas.verdicts)
      for (const c of v.components) found.set(index(c), [...(found.get(index(c)) || []), v]);
    return found;
  }, [atlas]);
  const shown = useMemo(() => {
    if (!show) return null;
    const of = atlas.verdicts.filter((v) => v.verdict === show || `role:${v.role}` === show);
    return new Set(of.flatMap((v) => v.components.map(index)));
  }, [atlas, show]);
  const marks = useMemo(
    () => new Set(atlas.verdicts.filter((v) => v.verdict === "supported").flatMap((v) => v.components.map(index))),
    [atlas],
  );

  const open = (i) => go(headHref(Math.floor(i / heads), i % heads));
  const lock = (i) => address.set({ at: i === locked ? null : name(Math.floor(i / heads), i % heads) });
  // what is locked, compared and in sight stays from heads to heads, not from heads to neurons
  const choose = (next) => address.set({ method: next.id, zoom: null, ...(scoresNeurons(next) !== neuronal && { at: null, vs: null, show: null }) });
  const step = (by) => every.length > 0 && choose(every[(every.indexOf(method) + by + every.length) % every.length]);
  useKeys(
    [
      { key: "[", does: "the method before", run: () => step(-1) },
      { key: "]", does: "the next method", run: () => step(1) },
      ...(neuronal ? [] : GRID_KEYS),
      { key: "Escape", does: neuronal ? "" : "release the locked head", run: () => (hovered === null && locked === null ? false : (setHovered(null), address.set({ at: null }))) },
    ],
  );

  const one = useGet(method && !neuronal ? `/api/scores/${method.id}` : null);
  const two = useGet(other && !neuronal ? `/api/scores/${other.id}` : null);
  const { model } = atlas;
  const told = hovered ?? locked;
  const grid = { layers, heads, shown, marks, hovered, locked, onHover: setHovered, onLock: lock, onOpen: open };

  return html`
    <header class="title">
      <h1>${neuronal ? "Neurons" : "Heads"} of ${model.name}</h1>
      <p class="soft">${layers} layers × ${neuronal ? `${method.shape[1]} neurons` : `${heads} heads, ${model.anatomy.n_kv_heads} kv heads`}, d_model ${model.anatomy.d_model} · fingerprint ${model.fingerprint} · seed ${atlas.seed}</p>
    </header>
    <div class="controls panel">
      <label>Method
        <select id="method" value=${method?.id} onChange=${(e) => choose(every.find((m) => m.id === e.target.value))}>
          ${[["heads", drawn], ["neurons", ofNeurons]].filter(([, of]) => of.length).map(([unit, of]) => html`<optgroup label=${unit}>
            ${of.map((m) => html`<option value=${m.id} selected=${m === method}>${m.id}</option>`)}</optgroup>`)}
        </select>
      </label>
      <label>Compare with
        <select id="vs" value=${other?.id || ""} onChange=${(e) => address.set({ vs: e.target.value })}>
          <option value="" selected=${!other}>nothing</option>
          ${peers.map((m) => html`<option value=${m.id} selected=${m === other}>${m.id}</option>`)}
        </select>
      </label>
      ${!neuronal && html`<label>Show
        <select id="show" value=${show} onChange=${(e) => address.set({ show: e.target.value })}>
          <option value="" selected=${!show}>all heads</option>
          <optgroup label="heads of roles that are">
            ${VERDICTS.map((v) => html`<option value=${v} selected=${show === v}>${v}</option>`)}
          </optgroup>
          <optgroup label="heads tested for">
            ${[...new Set(atlas.verdicts.map((v) => v.role))].map((r) => html`<option value=${`role:${r}`} selected=${show === `role:${r}`}>${r}</option>`)}
          </optgroup>
        </select>
      </label>`}
      ${shown && !neuronal && html`<span class="soft count">${shown.size} of ${layers * heads} heads</span>`}
      ${drawn.length > 0 && !neuronal && html`<${Save} says="Save all methods" what="all methods" of=${{ of: "methods" }} />`}
    </div>
    ${asked && method?.id !== asked && html`<p class="soft">This atlas has no scores of ${asked}.</p>`}
    ${!method && html`<p>This atlas holds no scores of heads or neurons.</p>`}
    ${neuronal && html`<${Neurons} method=${method} other=${other} />`}
    ${!neuronal && html`<div class=${other ? "compare" : "single"}>
      ${method && html`<section class="panel">
        <h2>${method.title}</h2>
        <p class="soft">Higher means ${method.higher_means}. ${method.paper && html`<span class="paper">${method.paper}</span>`}</p>
        ${one.error && html`<${Failure} error=${one.error} />`}
        ${one.value && html`<${Heat} ...${grid} values=${one.value.values} label=${method.id} />
          <${Scale} most=${limit(one.value.values)} low=${method.low} />
          <span class="soft legend"><i class="ring"></i> in a supported role ${marks.size ? "" : "(none)"}</span>
          <${Save} what=${`the scores of ${method.id}`} of=${{ of: "scores", method: method.id }} />`}
      </section>`}
      ${other && html`<section class="panel">
        <h2>${other.title}</h2>
        <p class="soft">Higher means ${other.higher_means}. ${other.paper && html`<span class="paper">${other.paper}</span>`}</p>
        ${two.error && html`<${Failure} error=${two.error} />`}
        ${two.value && html`<${Heat} ...${grid} values=${two.value.values} label=${other.id} />
          <${Scale} most=${limit(two.value.values)} low=${other.low} />
          <${Save} what=${`the scores of ${other.id}`} of=${{ of: "scores", method: other.id }} />`}
      </section>`}
      ${method && one.value && !other && html`<${Ranking} values=${one.value.values} heads=${heads} shown=${shown} told=${told} onHover=${setHovered} rolesOf=${rolesOf} />`}
    </div>`}
    ${other && one.value && two.value && html`<${Compared} x=${method} y=${other} xs=${one.value.values} ys=${two.value.values}
      heads=${heads} shown=${shown} locked=${locked} told=${told} onLock=${lock} onHover=${setHovered} />`}
    <${Roles} verdicts=${atlas.verdicts} show=${show} />
    ${method?.example && html`<${AtWork} method=${method} />`}
    <${NotShown} atlas=${atlas} drawn=${every} />
  `;
}

function Ranking({ values, heads, shown, told, onHover, rolesOf }) {
  const theme = useTheme();
  const most = limit(values);
  const best = useMemo(() => {
    const every = [...values.keys()].filter((i) => !Number.isNaN(values[i]) && (!shown || shown.has(i)));
    return every.sort((a, b) => values[b] - values[a]).slice(0, 15);
  }, [values, shown]);
  return html`<section class="panel ranking">
    <h2>Top heads</h2>
    <ol>
      ${best.map((i) => {
        const [l, h] = [Math.floor(i / heads), i % heads];
        const roles = (rolesOf.get(i) || []).map((v) => `${SIGNS[v.verdict]} ${v.role}`);
        return html`<li class=${i === told ? "told" : ""} onPointerEnter=${() => onHover(i)} onPointerLeave=${() => onHover(null)}>
          <a href=${headHref(l, h)}>${name(l, h)}</a>
          <span class="bar" style=${{ width: `${(Math.abs(values[i]) / most) * 90}px`, background: css(values[i] < 0 ? -0.6 : 0.6, theme) }}></span>
          <span class="n">${number(values[i])}</span>
          <small class="soft">${roles.join("  ")}</small>
        </li>`;
      })}
    </ol>
  </section>`;
}

function Compared({ x, y, xs, ys, heads, shown, locked, told, onLock, onHover }) {
  const theme = useTheme();
  const agreement = useGet(`/api/agreement?x=${x.id}&y=${y.id}`);
  const rows = useMemo(
    () => [...xs.keys()].filter((i) => !Number.isNaN(xs[i] + ys[i])).map((i) => ({ i, x: xs[i], y: ys[i], head: name(Math.floor(i / heads), i % heads), on: !shown || shown.has(i) })),
    [xs, ys, shown],
  );
  const a = agreement.value;
  return html`<section class="panel">
    <h2>Do they agree?</h2>
    ${agreement.error && html`<${Failure} error=${agreement.error} />`}
    ${a && html`<p>Rank correlation (Spearman) <b>${number(a.spearman, 2)}</b> over ${a.n} heads; of the top 10 of each, ${number(10 * a.overlap_top, 0)} are shared.</p>`}
    <${Chart}
      label=${`Scatter of ${x.id} against ${y.id}`}
      deps=${[rows, locked]}
      onReady=${(figure) => {
        figure.addEventListener("input", () => onHover(figure.value ? figure.value.i : null));
        figure.addEventListener("click", () => figure.value && onLock(figure.value.i));
      }}
      draw=${(Plot, width) => ({
        width: Math.min(width, 720),
        height: Math.min(width, 420),
        marginLeft: 50,
        grid: true,
        x: { label: `${x.id} →`, nice: true },
        y: { label: `↑ ${y.id}`, nice: true },
        marks: [
          Plot.dot(rows.filter((r) => !r.on), { x: "x", y: "y", r: 3, fill: "currentColor", fillOpacity: 0.12 }),
          Plot.dot(rows.filter((r) => r.on), { x: "x", y: "y", r: 3.5, fill: css(0.65, theme), fillOpacity: 0.75 }),
          Plot.dot(rows.filter((r) => r.i === locked), { x: "x", y: "y", r: 7, stroke: "currentColor", strokeWidth: 2 }),
          Plot.text(rows.filter((r) => r.i === locked), { x: "x", y: "y", text: "head", dy: -14, fill: "currentColor" }),
          Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: (d) => `${d.head}\n${x.id} ${number(d.x)}\n${y.id} ${number(d.y)}`, fill: "var(--panel)" })),
        ],
      })}
    />
    <${Save} what="the comparison" of=${{ of: "scores", method: x.id, against: y.id }} />
  </section>`;
}

function Roles({ verdicts, show }) {
  if (!verdicts.length) return html`<section class="panel"><h2>Roles</h2><p>No role was tested in this scan. A score alone is not a role.</p></section>`;
  return html`<section class="panel">
    <h2>Roles, tested by intervention</h2>
    <p class="soft">The heads' output is replaced on held-out prompts; random heads, matched in size and layer, get the same. A score alone is not a role.</p>
    <div class="scroll"><table class="roles">
      <thead><tr><th>Role</th><th>Verdict</th><th class="n">Effect</th><th class="n">Random heads</th><th class="n">Difference, 95 %</th><th class="n">p</th><th>Heads</th></tr></thead>
      <tbody>
        ${verdicts.map((v) => html`<tr>
          <td><a href=${hrefWith({ show: show === `role:${v.role}` ? null : `role:${v.role}`, method: v.method })}><b>${v.role}</b></a><br /><small class="soft">${v.claim}</small></td>
          <td><${Verdict} verdict=${v.verdict} /><${Save} what=${`the proof of ${v.role}`} of=${{ of: "role", role: v.role, heads: v.components }} /></td>
          <td class="n">${signed(v.effect)}<br /><small class="soft">${v.metric}, ${v.intervention}</small></td>
          <td class="n">${signed(v.control_mean)} ± ${number(v.control_sd)}</td>
          <td class="n">${signed(v.diff_ci_low)} … ${signed(v.diff_ci_high)}</td>
          <td class="n">${number(v.p, 4)}</td>
          <td class="heads">${v.components.map((c) => { const p = parseHead(c); return p ? html`<a href=${headHref(...p)}>${c}</a> ` : html`${c} `; })}
            <small class="soft reason">${v.reason}</small></td>
        </tr>`)}
      </tbody>
    </table></div>
  </section>`;
}

function NotShown({ atlas, drawn }) {
  const rest = atlas.methods.filter((m) => !drawn.includes(m));
  const skipped = Object.values(atlas.skipped);
  if (!rest.length && !skipped.length) return null;
  return html`<section class="panel"><h2>Not shown</h2><ul>
    ${rest.map((m) => html`<li>${m.id}: its scores are by ${m.dims.join(" × ")} (${m.shape.join(" × ")}), which this view does not draw yet.</li>`)}
    ${skipped.map((why) => html`<li>${why}</li>`)}
  </ul></section>`;
}
