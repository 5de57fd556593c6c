// Small pieces that several views use.
import { html, useEffect, useRef } from "./ui.js";
import { css } from "./colour.js";
import { useTheme } from "./theme.js";
import { number, visible } from "./text.js";

export const SIGNS = { supported: "✓", "not supported": "✗", inconclusive: "?", "not testable": "–" };

export const Verdict = ({ verdict }) =>
  html`<span class=${`verdict ${verdict.replaceAll(" ", "-")}`}><span aria-hidden="true">${SIGNS[verdict]}</span> ${verdict}</span>`;

export const Failure = ({ error }) => html`<p class="failure" role="alert">${error}</p>`;

export const Waiting = ({ children }) => html`<p class="soft waiting">${children || "Loading …"}</p>`;

export const Token = ({ text }) => html`<code class="token">${visible(text)}</code>`;

// The colours of a signed scale with its ends.
export function Scale({ most, low }) {
  const theme = useTheme();
  const from = low < 0 ? -1 : 0;
  const steps = Array.from({ length: 13 }, (_, i) => css(from + ((1 - from) * i) / 12, theme));
  return html`<span class="scale">
    <span>${from < 0 ? number(-most) : "0"}</span>
    <span class="bar" style=${{ background: `linear-gradient(to right, ${steps.join(", ")})` }}></span>
    ${from < 0 && html`<span class="soft">(0 in the middle)</span>`}
    <span>${number(most)}</span>
  </span>`;
}

// Tokens with signed bars: what is raised or lowered, most first.
export function TokenTable({ rows, caption, value = (row) => row.value, head = "logit" }) {
  const theme = useTheme();
  const most = Math.max(...rows.map((row) => Math.abs(value(row))), 1e-9);
  return html`<table class="tokens">
    <caption>${caption}</caption>
    <thead class="sr"><tr><th>token</th><th>${head}</th></tr></thead>
    <tbody>
      ${rows.map(
        (row) => html`<tr>
          <td><${Token} text=${row.token} /></td>
          <td class="n">
            <span class="bar" style=${{ width: `${(Math.abs(value(row)) / most) * 60}px`, background: css(value(row) < 0 ? -0.55 : 0.55, theme) }}></span>
            ${value(row) > 0 ? "+" : ""}${number(value(row), 2)}
          </td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

// A chart of Observable Plot: `draw(Plot, width)` gives its options; drawn anew when `deps` change.
export function Chart({ draw, deps, label, onReady }) {
  const box = useRef();
  const theme = useTheme();
  useEffect(() => {
    let current = true;
    import("./plot.js").then(({ Plot, d3 }) => {
      if (!current || !box.current) return;
      const figure = Plot.plot({ className: "plot", style: { background: "transparent" }, ...draw(Plot, box.current.clientWidth || 300, d3) });
      figure.setAttribute("role", "img");
      figure.setAttribute("aria-label", label);
      box.current.replaceChildren(figure);
      onReady?.(figure);
    });
    return () => {
      current = false;
    };
  }, [...deps, theme]);
  return html`<div class="chart" ref=${box}></div>`;
}

// Effect of the chosen heads against random ones, for growing numbers of heads.
export function Dose({ verdict }) {
  const theme = useTheme();
  if (verdict.dose.length < 2) return null;
  const rows = verdict.dose.flatMap((d) => [
    { k: d.k, effect: d.effect, heads: "chosen" },
    { k: d.k, effect: d.control_mean, heads: "random" },
  ]);
  return html`<${Chart}
    label=${`Dose curve of ${verdict.role}: ${rows.map((r) => `${r.k} ${r.heads} heads ${number(r.effect)}`).join(", ")}`}
    deps=${[verdict]}
    draw=${(Plot, width) => ({
      width: Math.min(width, 380),
      height: 170,
      marginLeft: 48,
      marginRight: 60,
      x: { label: "heads", type: "point", tickFormat: String },
      y: { label: `change of ${verdict.metric}`, grid: true, nice: true },
      marks: [
        Plot.ruleY([0], { stroke: "currentColor", strokeOpacity: 0.4 }),
        Plot.lineY(rows, {
          x: "k", y: "effect", z: "heads",
          stroke: (d) => (d.heads === "chosen" ? css(0.7, theme) : css(-0.7, theme)),
          strokeDasharray: null, strokeWidth: 2,
        }),
        Plot.dot(rows, {
          x: "k", y: "effect", symbol: (d) => (d.heads === "chosen" ? "circle" : "square"),
          fill: (d) => (d.heads === "chosen" ? css(0.7, theme) : css(-0.7, theme)),
          channels: { heads: "heads" }, tip: true, r: 4,
        }),
        Plot.text(rows.slice(-2), { x: "k", y: "effect", text: "heads", textAnchor: "start", dx: 9, fill: "currentColor" }),
      ],
      symbol: { type: "identity" },
    })}
  />`;
}

// Where the chosen heads' effect lies among those of the random sets.
export function Controls({ verdict }) {
  const theme = useTheme();
  if (!verdict.control_effects.length) return null;
  return html`<${Chart}
    label=${`Effect ${number(verdict.effect)} against ${verdict.control_effects.length} random sets from ${number(Math.min(...verdict.control_effects))} to ${number(Math.max(...verdict.control_effects))}`}
    deps=${[verdict]}
    draw=${(Plot, width) => ({
      width: Math.min(width, 380),
      height: 104,
      marginTop: 38,
      marginLeft: 36,
      marginRight: 28,
      x: { label: `change of ${verdict.metric}`, nice: true, ticks: 5 },
      marks: [
        Plot.ruleX([0], { stroke: "currentColor", strokeOpacity: 0.4 }),
        Plot.dotX(verdict.control_effects, { y: 0, stroke: css(-0.7, theme), symbol: "square", r: 4, strokeOpacity: 0.8 }),
        Plot.dot([verdict.effect], { x: (d) => d, y: 0, fill: css(0.7, theme), r: 6 }),
        Plot.text([verdict.effect], { x: (d) => d, y: 0, text: () => "chosen", dy: -26, fill: "currentColor" }),
        Plot.text([verdict.control_mean], { x: (d) => d, y: 0, text: () => "random sets", dy: -14, fill: "currentColor", textAnchor: "middle" }),
      ],
      y: { axis: null },
    })}
  />`;
}
