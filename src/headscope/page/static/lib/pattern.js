// A head's attention, query × key, on a canvas: thousands of tokens stay fluid, since hovering only moves an overlay.
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";
import { css, pixels, strong, variable } from "./colour.js";
import { prepared, useWidth } from "./heat.js";
import { useKeys } from "./keys.js";
import { Scale, Token } from "./parts.js";
import { useTheme } from "./theme.js";
import { number, visible } from "./text.js";

const WORDS = 48; // tokens that get a label at the rows and columns

// The largest weight that is drawn: without the first token, which many heads look at when they have nothing to do, the
// colours are for the others alone.
function strongest(values, n, first) {
  if (first) return 1;
  let most = 0;
  for (let i = 0; i < values.length; i++) if (i % n && values[i] > most) most = values[i];
  return most || 1;
}

// values [query × key] in 0…1; locked: {q, k} or null; first: whether the first token's column is drawn; most: the weight
// of the strongest colour
function Pattern({ values, tokens, locked, onLock, large, first, most: top }) {
  const [hovered, onHover] = useState(null); // here and not above, so that moving the mouse draws nothing else anew
  const n = tokens.length;
  const box = useRef();
  const base = useRef();
  const over = useRef();
  const width = useWidth(box);
  const theme = useTheme();
  const labelled = n <= WORDS;
  const margin = useMemo(() => (labelled ? Math.min(110, 12 + 7 * Math.max(...tokens.map((t) => visible(t).length))) : 40), [tokens]);
  const room = Math.max(80, Math.min(width, large ? 1100 : 620) - margin - 2);
  const cell = labelled ? Math.max(1, Math.min(22, Math.floor(room / n))) : room / n;
  const side = cell * n;
  const full = { w: margin + side + 2, h: side + (labelled ? margin : 20) };

  useEffect(() => {
    if (!width) return;
    const context = prepared(base.current, full.w, full.h);
    const table = pixels(theme);
    // an image with a pixel a cell, or where there are more cells than pixels the largest of those that share one:
    // averaging would make thin lines disappear
    const most = Math.min(n, Math.round(side * (window.devicePixelRatio || 1)));
    const image = new ImageData(most, most);
    const data = new Uint32Array(image.data.buffer);
    const best = new Float32Array(most * most);
    const place = new Uint16Array(n);
    for (let i = 0; i < n; i++) place[i] = Math.floor((i * most) / n);
    for (let q = 0; q < n; q++) {
      const row = place[q] * most;
      for (let k = first ? 0 : 1; k < n; k++) {
        const at = row + place[k];
        if (values[q * n + k] > best[at]) best[at] = values[q * n + k];
      }
    }
    for (let i = 0; i < data.length; i++) data[i] = table[Math.min(255, Math.round((best[i] / top) * 255))];
    const small = document.createElement("canvas");
    small.width = small.height = most;
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, margin, 0, side, side);
    if (!first) {
      context.fillStyle = variable("--cell-none");
      context.fillRect(margin, 0, Math.max(cell, 2), side);
    }
    context.strokeStyle = variable("--line");
    context.strokeRect(margin - 0.5, 0.5, side + 1, side);
    context.fillStyle = variable("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    if (labelled) {
      for (let i = 0; i < n; i++) {
        context.textAlign = "right";
        context.fillText(visible(tokens[i]), margin - 5, (i + 0.5) * cell, margin - 6);
        context.save();
        context.translate(margin + (i + 0.5) * cell, side + 6);
        context.rotate(-Math.PI / 3);
        context.fillText(visible(tokens[i]), 0, 0, margin);
        context.restore();
      }
    } else {
      const step = 10 ** Math.floor(Math.log10(n / 2));
      for (let i = 0; i < n; i += step) {
        context.textAlign = "right";
        context.fillText(String(i), margin - 5, (i + 0.5) * cell + (i ? 0 : 4));
        context.textAlign = "center";
        context.fillText(String(i), margin + (i + 0.5) * cell, side + 11);
      }
    }
  }, [values, width, theme, large, first]);

  useEffect(() => onHover(null), [tokens]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(over.current, full.w, full.h);
    for (const [at, dash] of [[locked, []], [hovered, [3, 2]]]) {
      if (!at) continue;
      context.setLineDash(dash);
      context.strokeStyle = variable("--ink");
      context.lineWidth = 1;
      const size = Math.max(cell, 4);
      context.strokeRect(margin, at.q * cell, side, Math.max(cell, 1));
      if (at.k === null) continue;
      context.lineWidth = 2;
      context.strokeRect(margin + (at.k + 0.5) * cell - size / 2, (at.q + 0.5) * cell - size / 2, size, size);
    }
  }, [hovered, locked, values, width, theme, large]);

  function at(event) {
    const area = over.current.getBoundingClientRect();
    const q = Math.floor((event.clientY - area.top) / cell);
    const k = Math.floor((event.clientX - area.left - margin) / cell);
    return q >= 0 && q < n && k >= 0 && k < n ? { q, k } : null;
  }

  function key(event) {
    const from = hovered || locked || { q: n - 1, k: n - 1 };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const inside = (i) => Math.max(0, Math.min(n - 1, i));
    if (steps[event.key]) onHover({ q: inside(from.q + steps[event.key][0]), k: inside((from.k ?? n - 1) + steps[event.key][1]) });
    else if (event.key === " " || event.key === "Enter") onLock(from);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  return html`<div class="heat" ref=${box}>
    <div class="stack">
      <canvas ref=${base} aria-hidden="true"></canvas>
      <canvas ref=${over} class="over" tabindex="0" role="application"
        aria-label=${`Attention of ${n} tokens, rows look at columns; arrows walk, space locks`}
        onPointerMove=${(e) => onHover(at(e))} onPointerLeave=${() => onHover(null)}
        onClick=${(e) => at(e) && onLock(at(e))} onKeyDown=${key}></canvas>
    </div>
    <${Read} at=${hovered || locked} values=${values} tokens=${tokens} />
  </div>`;
}

function Read({ at, values, tokens }) {
  if (!at) return html`<p class="read soft" aria-live="polite">Rows look at columns. Hover or walk with the arrows; click locks.</p>`;
  const n = tokens.length;
  const row = values.subarray(at.q * n, at.q * n + n);
  const value = at.k === null ? null : row[at.k];
  const rank = value === null ? null : 1 + row.reduce((count, x) => count + (x > value), 0);
  return html`<p class="read" aria-live="polite">
    <code class="token">${visible(tokens[at.q])}</code><small class="soft"> ${at.q}</small>
    ${value !== null && html` looks at <code class="token">${visible(tokens[at.k])}</code><small class="soft"> ${at.k}</small> ${" "}<b>${number(value, 4)}</b>
      <span class="soft"> (${rank === 1 ? "most" : `number ${rank}`} of its row)</span>`}
  </p>`;
}

// What the address holds of a pattern of n tokens: the locked cell, and whether the first token is drawn.
export function useLook(address, n) {
  const whole = (text) => (text !== null && /^\d+$/.test(text) && Number(text) < n ? Number(text) : null);
  const query = whole(address.get("q"));
  const key = whole(address.get("k"));
  const first = address.get("sink") !== "0";
  const locked = useMemo(() => (query === null ? null : { q: query, k: key }), [query, key]);
  const lock = ({ q, k }) => address.set(locked && q === locked.q && k === locked.k ? { q: null, k: null } : { q, k });
  useKeys([{ key: "Escape", does: "release what is locked", run: () => (locked ? address.set({ q: null, k: null }) : false) }]);
  return { at: query ?? n - 1, key, first, locked, lock, from: (q) => address.set({ q, k: null }), draw: (first) => address.set({ sink: first ? null : "0" }) };
}

// The pattern with its scale, and with or without the first token.
export function Attention({ values, tokens, look, large }) {
  const most = useMemo(() => strongest(values, tokens.length, look.first), [values, look.first]);
  return html`<${Pattern} values=${values} tokens=${tokens} locked=${look.locked} onLock=${look.lock} large=${large} first=${look.first} most=${most} />
    <${Scale} most=${most} low=${0} />
    <label class="small"><input type="checkbox" checked=${!look.first} onChange=${() => look.draw(!look.first)} /> without the first token, the usual sink</label>`;
}

// The prompt as text, each token shaded by how much the query looks at it.
export function Looked({ values, tokens, look }) {
  const query = look.at;
  const theme = useTheme();
  const n = tokens.length;
  const box = useRef();
  useEffect(() => {
    const [all, at] = [box.current, box.current.querySelector(".query")];
    // the frame stays in sight in a long prompt, without moving the page
    if (at && (at.offsetTop < all.scrollTop || at.offsetTop > all.scrollTop + all.clientHeight - 24)) all.scrollTop = at.offsetTop - all.clientHeight / 2;
  }, [query, tokens]);
  return html`<h3>From <${Token} text=${tokens[query]} /> <small class="soft">position ${query}</small></h3>
  <p class="looked" ref=${box}>
    ${tokens.map((token, k) => {
      const value = values[query * n + k];
      return html`<button key=${k} class=${k === query ? "query" : ""} title=${`${k}: ${number(value, 4)}`} aria-pressed=${k === query}
        style=${{ background: value > 0.002 ? css(value, theme) : "transparent", color: strong(value, theme) ? "var(--on-strong)" : "var(--ink)" }}
        onClick=${() => look.from(k)}>${visible(token)}</button>`;
    })}
  </p>
  <p class="soft">Click a token to look from there.</p>`;
}
