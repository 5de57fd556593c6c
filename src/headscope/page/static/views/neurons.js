// The atlas where a method scores neurons: all of them as a density, the highest by name, and what a locked one writes.
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { hrefWith, useAddress, viewHref } from "../lib/address.js";
import { useAsk, useGet } from "../lib/api.js";
import { css, limit } from "../lib/colour.js";
import { Density } from "../lib/density.js";
import { useKeys } from "../lib/keys.js";
import { Failure, TokenTable, Waiting } from "../lib/parts.js";
import { extremes, rankOf } from "../lib/plane.js";
import { Save } from "../lib/save.js";
import { saved } from "../lib/saved.js";
import { useTheme } from "../lib/theme.js";
import { neuronName, number, parseNeuron } from "../lib/text.js";

export const scoresNeurons = (method) => method.dims.join() === "layer,neuron";

export function Neurons({ method, other }) {
  const address = useAddress();
  const scores = useGet(`/api/scores/${method.id}`);
  const [layers, neurons] = method.shape;
  const [hovered, setHovered] = useState(null);
  const at = parseNeuron(address.get("at") || "");
  const locked = at && at[0] < layers && at[1] < neurons ? at[0] * neurons + at[1] : null;
  const lock = (i) => address.set({ at: i === locked ? null : neuronName(i, neurons) });
  useEffect(() => setHovered(null), [method.id]);
  useKeys([
    { key: "← → ↑ ↓", does: "walk over the neurons (in the density)", run: () => false },
    { key: "Space", does: "lock the neuron (in the density)", run: () => false },
    { key: "+ − 0", does: "closer, further, all neurons (in the density)", run: () => false },
    {
      key: "Escape", does: "release the locked neuron, then show all",
      run: () => {
        if (hovered === null && locked === null && !address.get("zoom")) return false;
        setHovered(null);
        address.set(hovered === null && locked === null ? { zoom: null } : { at: null });
      },
    },
  ]);
  const values = scores.value?.values;
  return html`<div class="single">
    <section class="panel">
      <h2>${method.title}</h2>
      <p class="soft">Higher means ${method.higher_means}. ${method.paper && html`<span class="paper">${method.paper}</span>`}</p>
      ${scores.error && html`<${Failure} error=${scores.error} />`}
      ${scores.loading && html`<${Waiting} />`}
      ${values && html`<${Density} key=${method.id} values=${values} neurons=${neurons} label=${method.id} hovered=${hovered} onHover=${setHovered} locked=${locked} onLock=${lock}
        zoom=${address.get("zoom")} onZoom=${(zoom) => address.set({ zoom }, { replace: true })} />
        <${Save} what=${`the scores of ${method.id}`} of=${{ of: "scores", method: method.id }} />`}
    </section>
    ${values && html`<section class="panel ranking">
      ${locked !== null && html`<${Locked} values=${values} index=${locked} neurons=${neurons} />`}
      <${Ranking} values=${values} neurons=${neurons} told=${hovered ?? locked} locked=${locked} onHover=${setHovered} />
    </section>`}
  </div>
  ${other && html`<${Agreement} x=${method} y=${other} />`}`;
}

function Locked({ values, index, neurons }) {
  const name = neuronName(index, neurons);
  const place = useMemo(() => rankOf(values, index), [values, index]);
  const [layer, neuron] = [Math.floor(index / neurons), index % neurons];
  const written = useAsk("/api/neuron", saved ? null : { layer, neuron });
  const off = viewHref("/try", { edits: JSON.stringify([{ op: "zero", on: name }]) });
  return html`<article class="neuron">
    <h2>${name}</h2>
    <p>${Number.isNaN(values[index]) ? "It was not measured." : html`Score <b>${number(values[index], 4)}</b>, rank ${place.rank.toLocaleString("en")} of ${place.of.toLocaleString("en")}.`}
      ${!saved && html` <a href=${off}>Try without it</a>`}</p>
    ${saved && html`<p class="soft">What it writes is read from the model: headscope serve ATLAS.</p>`}
    ${written.error && html`<${Failure} error=${written.error} />`}
    ${written.loading && !written.value && html`<${Waiting}>Reading its weights …<//>`}
    ${written.value && html`<div class=${written.stale ? "stale" : ""}>
      <p class="soft">Its row of W_out through the final norm’s gain and the unembedding: what it writes where its activation is positive (the opposite where that is negative), as if nothing came after.</p>
      <div class="pair"><${TokenTable} caption="raises" rows=${written.value.promoted} /><${TokenTable} caption="lowers" rows=${written.value.suppressed} /></div>
    </div>`}
  </article>`;
}

function Ranking({ values, neurons, told, locked, onHover }) {
  const theme = useTheme();
  const [best, last] = useMemo(() => [extremes(values, 15), extremes(values, 5, -1).filter((i) => values[i] < 0)], [values]);
  const most = limit([...best, ...last].map((i) => values[i]));
  const row = (i) => html`<li key=${i} class=${i === told ? "told" : ""} onPointerEnter=${() => onHover(i)} onPointerLeave=${() => onHover(null)}>
    <a class="of-neuron" href=${hrefWith({ at: neuronName(i, neurons) })} aria-current=${i === locked ? "true" : null}>${neuronName(i, neurons)}</a>
    <span class="bar" style=${{ width: `${(Math.abs(values[i]) / most) * 90}px`, background: css(values[i] < 0 ? -0.6 : 0.6, theme) }}></span>
    <span class="n">${number(values[i])}</span>
  </li>`;
  return html`<h2>Top neurons</h2><ol>${best.map(row)}</ol>
    ${last.length > 0 && html`<h3>Lowest</h3><ol>${last.map(row)}</ol>`}`;
}

function Agreement({ x, y }) {
  const agreement = useGet(`/api/agreement?x=${x.id}&y=${y.id}`);
  const a = agreement.value;
  return html`<section class="panel"><h2>Do they agree?</h2>
    ${agreement.error && html`<${Failure} error=${agreement.error} />`}
    ${a && html`<p>Rank correlation of ${x.id} and ${y.id} (Spearman) <b>${number(a.spearman, 2)}</b> over ${a.n.toLocaleString("en")} neurons; of the top 10 of each, ${number(10 * a.overlap_top, 0)} are shared. Scores of neurons are compared by numbers only, without a scatter.</p>`}
  </section>`;
}
