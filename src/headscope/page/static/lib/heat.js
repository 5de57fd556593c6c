// Layers × heads on a canvas. Hover previews, click locks, Enter or double click opens; arrows walk.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { limit, rgb, variable } from "./colour.js";
import { useTheme } from "./theme.js";
import { name, number } from "./text.js";

const LEFT = 34;
const BOTTOM = 18;

export function useWidth(ref) {
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => set(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current);
    set(Math.floor(ref.current.clientWidth));
    return () => watch.disconnect();
  }, []);
  return width;
}

// A canvas of so many CSS pixels, sharp on every screen; returns its context.
export function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// values [layer × head]; shown: Set of indices that are not dimmed, or null; marks: Set of indices with a ring
export function Heat({ values, layers, heads, shown, marks, hovered, locked, onHover, onLock, onOpen, label, digits = 3 }) {
  const box = useRef();
  const base = useRef();
  const over = useRef();
  const width = useWidth(box);
  const theme = useTheme();
  const cellW = Math.max(3, Math.min(56, Math.floor((width - LEFT - 2) / heads)));
  const cellH = Math.max(4, Math.min(cellW, Math.floor(620 / layers), 22));
  const full = { w: LEFT + heads * cellW + 2, h: layers * cellH + BOTTOM };
  const place = (i) => [LEFT + (i % heads) * cellW, (layers - 1 - Math.floor(i / heads)) * cellH];

  useEffect(() => {
    if (!width) return;
    const context = prepared(base.current, full.w, full.h);
    const most = limit(values);
    const gap = cellW >= 6 && cellH >= 6 ? 1 : 0;
    const [ink, soft, ground] = ["--ink", "--soft", "--cell-none"].map(variable);
    for (let i = 0; i < values.length; i++) {
      const [x, y] = place(i);
      context.globalAlpha = shown && !shown.has(i) ? 0.18 : 1;
      if (Number.isNaN(values[i])) {
        context.fillStyle = ground;
        context.fillRect(x + cellW / 2 - 1, y + cellH / 2 - 1, 2, 2);
        continue;
      }
      context.fillStyle = `rgb(${rgb(values[i] / most, theme)})`;
      context.fillRect(x, y, cellW - gap, cellH - gap);
      if (values[i] < -0.02 * most && cellW >= 7) {
        context.fillStyle = ink;
        context.fillRect(x + cellW / 2 - 2.5, y + cellH / 2 - 1, 4, 1);
      }
    }
    context.globalAlpha = 1;
    context.strokeStyle = variable("--mark");
    context.lineWidth = 1.5;
    for (const i of marks || []) {
      if (shown && !shown.has(i)) continue;
      const [x, y] = place(i);
      context.strokeRect(x + 0.25, y + 0.25, cellW - gap - 0.5, cellH - gap - 0.5);
    }
    context.fillStyle = soft;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    const everyLayer = Math.ceil(14 / cellH);
    for (let l = 0; l < layers; l += everyLayer) context.fillText(`L${l}`, 2, (layers - 0.5 - l) * cellH);
    context.textBaseline = "alphabetic";
    context.textAlign = "center";
    const everyHead = Math.ceil(22 / cellW);
    for (let h = 0; h < heads; h += everyHead) context.fillText(`H${h}`, LEFT + (h + 0.5) * cellW, full.h - 5);
    context.textAlign = "start";
    if (!performance.getEntriesByName("atlas-painted").length) performance.mark("atlas-painted");
  }, [values, width, theme, shown, marks]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(over.current, full.w, full.h);
    for (const [i, colour, thick] of [[locked, variable("--ink"), 2.5], [hovered, variable("--ink"), 1.5]]) {
      if (i === null || i === undefined) continue;
      const [x, y] = place(i);
      context.strokeStyle = variable("--panel");
      context.lineWidth = thick + 2;
      context.strokeRect(x - 0.5, y - 0.5, cellW, cellH);
      context.strokeStyle = colour;
      context.lineWidth = thick;
      context.strokeRect(x - 0.5, y - 0.5, cellW, cellH);
    }
  }, [hovered, locked, width, theme, layers, heads]);

  function at(event) {
    const area = over.current.getBoundingClientRect();
    const h = Math.floor((event.clientX - area.left - LEFT) / cellW);
    const l = layers - 1 - Math.floor((event.clientY - area.top) / cellH);
    return h >= 0 && h < heads && l >= 0 && l < layers ? l * heads + h : null;
  }

  function key(event) {
    const from = hovered ?? locked ?? (layers - 1) * heads;
    const [l, h] = [Math.floor(from / heads), from % heads];
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
    if (steps[event.key]) {
      const [dl, dh] = steps[event.key];
      onHover(Math.max(0, Math.min(layers - 1, l + dl)) * heads + Math.max(0, Math.min(heads - 1, h + dh)));
    } else if (event.key === "Enter") onOpen(from);
    else if (event.key === " ") onLock(from);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  const told = hovered ?? locked;
  return html`<div class="heat" ref=${box}>
    <div class="stack">
      <canvas ref=${base} aria-hidden="true"></canvas>
      <canvas
        ref=${over}
        class="over"
        tabindex="0"
        role="application"
        aria-label=${`${label}: ${layers} layers by ${heads} heads; arrows walk, space locks, Enter opens the head`}
        onPointerMove=${(e) => onHover(at(e))}
        onPointerLeave=${() => onHover(null)}
        onClick=${(e) => at(e) !== null && onLock(at(e))}
        onDblClick=${(e) => at(e) !== null && onOpen(at(e))}
        onKeyDown=${key}
      ></canvas>
    </div>
    <p class="read" aria-live="polite">
      ${told === null || told === undefined
        ? html`<span class="soft">Hover or walk with the arrows; click locks, Enter opens.</span>`
        : html`<b>${name(Math.floor(told / heads), told % heads)}</b> ${" "}${number(values[told], digits + 1)}`}
    </p>
  </div>`;
}
