// The logit lens on a canvas: layers × positions, the best token of each. Hover previews the five best, click locks.
import { html, useEffect, useRef, useState } from "./ui.js";
import { rgb, css, strong, variable } from "./colour.js";
import { prepared } from "./heat.js";
import { useTheme } from "./theme.js";
import { number, percent, visible } from "./text.js";

const LEFT = 34;
const HEAD = 24;
const WIDE = 76;
const HIGH = 19;

export const columnsFor = (width) => Math.max(2, Math.min(48, Math.floor((width - LEFT) / WIDE)));

// lens: the server's answer; by: "best" or "target", what the colour shows; cell: {level, position} or null
export function LensTable({ lens, tokens, width, position, by, locked, onLock, onPosition }) {
  const [hovered, setHovered] = useState(null);
  const base = useRef();
  const over = useRef();
  const theme = useTheme();
  const n = lens.stop - lens.start;
  const rows = lens.levels.length;
  const cell = (width - LEFT) / Math.max(n, 1) > 130 ? 130 : Math.floor((width - LEFT) / n);
  const full = { w: LEFT + n * cell + 2, h: HEAD + rows * HIGH + 1 };
  const index = ({ level, position: p }) => level * n + p - lens.start;
  const place = ({ level, position: p }) => [LEFT + (p - lens.start) * cell, HEAD + (rows - 1 - level) * HIGH];
  const inside = (at) => at && at.level >= 0 && at.level < rows && at.position >= lens.start && at.position < lens.stop;

  useEffect(() => {
    if (!width) return;
    const context = prepared(base.current, full.w, full.h);
    const [ink, soft, light, mark] = ["--ink", "--soft", "--on-strong", "--mark"].map(variable);
    const shown = (text, room) => {
      let word = visible(text);
      while (word.length > 1 && context.measureText(word).width > room) word = `${word.slice(0, -2)}…`;
      return word;
    };
    context.textBaseline = "middle";
    for (let p = lens.start; p < lens.stop; p++) {
      context.font = `${p === position ? "700 " : ""}11px ui-monospace, monospace`;
      context.fillStyle = p === position ? ink : soft;
      context.fillText(shown(tokens[p], cell - 8), LEFT + (p - lens.start) * cell + 4, HEAD / 2);
    }
    for (let level = 0; level < rows; level++) {
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = soft;
      context.fillText(lens.levels[level], 2, HEAD + (rows - 0.5 - level) * HIGH);
      context.font = "11px ui-monospace, monospace";
      for (let p = lens.start; p < lens.stop; p++) {
        const at = { level, position: p };
        const i = index(at);
        const [x, y] = place(at);
        const value = by === "target" ? lens.target_p[i] : lens.p[i * lens.k];
        context.fillStyle = `rgb(${rgb(value, theme)})`;
        context.fillRect(x, y, cell - 1, HIGH - 1);
        context.fillStyle = strong(value, theme) ? light : ink;
        context.fillText(shown(lens.words[lens.top[i * lens.k]], cell - 8), x + 4, y + HIGH / 2);
        if (lens.top[i * lens.k] === lens.target) {
          context.strokeStyle = mark;
          context.lineWidth = 1.5;
          context.strokeRect(x + 0.75, y + 0.75, cell - 2.5, HIGH - 2.5);
        }
      }
    }
    if (position >= lens.start && position < lens.stop) {
      context.strokeStyle = ink;
      context.lineWidth = 1;
      context.strokeRect(LEFT + (position - lens.start) * cell - 0.5, 0.5, cell, full.h - 1);
    }
  }, [lens, width, theme, by, position, tokens]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(over.current, full.w, full.h);
    for (const [at, thick] of [[locked, 2.5], [hovered, 1.5]]) {
      if (!inside(at)) continue;
      const [x, y] = place(at);
      context.strokeStyle = variable("--panel");
      context.lineWidth = thick + 2;
      context.strokeRect(x - 0.5, y - 0.5, cell, HIGH);
      context.strokeStyle = variable("--ink");
      context.lineWidth = thick;
      context.strokeRect(x - 0.5, y - 0.5, cell, HIGH);
    }
  }, [lens, hovered, locked, width, theme]);

  function at(event) {
    const area = over.current.getBoundingClientRect();
    const found = {
      level: rows - 1 - Math.floor((event.clientY - area.top - HEAD) / HIGH),
      position: lens.start + Math.floor((event.clientX - area.left - LEFT) / cell),
    };
    return event.clientX - area.left >= LEFT && (inside(found) || (found.level === rows && inside({ ...found, level: 0 }))) ? found : null;
  }

  function key(event) {
    const from = inside(hovered) ? hovered : inside(locked) ? locked : { level: rows - 1, position: Math.max(lens.start, Math.min(lens.stop - 1, position)) };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (steps[event.key]) {
      const [dl, dp] = steps[event.key];
      const to = { level: from.level + dl, position: from.position + dp };
      setHovered(inside(to) ? to : from);
    } else if (event.key === " ") onLock(from);
    else if (event.key === "Enter") onPosition(from.position);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  const told = inside(hovered) ? hovered : inside(locked) ? locked : null;
  return html`<div class="lens-table">
    <div class="stack">
      <canvas ref=${base} aria-hidden="true"></canvas>
      <canvas ref=${over} class="over" tabindex="0" role="application"
        aria-label=${`Logit lens of ${rows} levels by positions ${lens.start} to ${lens.stop - 1}; arrows walk, space locks, Enter explains that position`}
        onPointerMove=${(e) => setHovered(at(e))} onPointerLeave=${() => setHovered(null)}
        onClick=${(e) => { const found = at(e); if (found) found.level === rows ? onPosition(found.position) : onLock(found); }}
        onDblClick=${(e) => at(e) && onPosition(at(e).position)} onKeyDown=${key}></canvas>
    </div>
    <${LensRead} lens=${lens} at=${told} i=${told && index(told)} tokens=${tokens} />
  </div>`;
}

function LensRead({ lens, at, i, tokens }) {
  const theme = useTheme();
  if (!at) return html`<p class="read soft" aria-live="polite">Hover or walk with the arrows for the five best; click locks, a click on a token at the top explains what follows it.</p>`;
  const best = Array.from({ length: lens.k }, (_, j) => ({ token: lens.words[lens.top[i * lens.k + j]], p: lens.p[i * lens.k + j] }));
  return html`<p class="read lens-read" aria-live="polite">
    <b>${lens.levels[at.level]}</b> after <code class="token">${visible(tokens[at.position])}</code><small class="soft"> ${at.position}</small>:
    ${best.map(({ token, p }) => html` <span class="guess" style=${{ borderBottomColor: css(Math.max(0.25, p), theme) }}><code class="token">${visible(token)}</code> ${percent(p)}</span>`)}
    <span class="soft"> · the target <code class="token">${visible(lens.words[lens.target])}</code> is number <b>${lens.rank[i].toLocaleString("en")}</b> with ${lens.target_p[i] < 0.0001 ? number(lens.target_p[i], 4) : percent(lens.target_p[i])}</span>
  </p>`;
}
