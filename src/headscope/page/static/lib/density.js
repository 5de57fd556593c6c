// Neurons by layer and score on a canvas: a density, which dissolves into single neurons once few are in sight. Wheel,
// pinch and + - zoom, dragging moves, hovering draws only the overlay.
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";
import { css, rgb, variable } from "./colour.js";
import { prepared, useWidth } from "./heat.js";
import { counted, moved, nearest, next, read, showing, whole, within, written, zoomed } from "./plane.js";
import { useQuiet } from "./quiet.js";
import { neuronName, number } from "./text.js";
import { useTheme } from "./theme.js";

const LEFT = 34;
const BOTTOM = 34;
const COLUMN = 2; // pixels
const MOST_DOTS = 2000;
const NEAR = 12; // pixels from the pointer to a dot
const STEP = 1.6;

export function Density({ values, neurons, zoom, onZoom, hovered, onHover, locked, onLock, label }) {
  const box = useRef();
  const base = useRef();
  const over = useRef();
  const width = useWidth(box);
  const theme = useTheme();
  const layers = values.length / neurons;
  const all = useMemo(() => whole(values, neurons), [values, neurons]);
  const [view, setView] = useState(() => read(zoom, all));
  const room = { w: Math.max(60, width - LEFT - 4), h: Math.max(180, Math.min(560, layers * 22)) };
  const columns = Math.ceil(room.w / COLUMN);
  const sight = useMemo(() => counted(values, neurons, view, columns), [values, neurons, view, columns]);
  const dots = useMemo(() => (sight.total > MOST_DOTS ? null : within(values, neurons, view)), [values, neurons, sight]);
  const frame = { view, room, neurons, values };

  const said = useRef(zoom);
  useEffect(() => {
    if (zoom !== said.current) setView(read(zoom, all)); // back, forward, or a link
    said.current = zoom;
  }, [zoom, all]);
  const quiet = useQuiet(view, 250);
  useEffect(() => {
    const text = written(quiet, all);
    if (text === said.current || quiet !== view) return;
    said.current = text;
    onZoom(text);
  }, [quiet]);

  const told = hovered ?? locked;
  const first = useRef(true);
  useEffect(() => {
    // what the address says at first is what was in sight, with the locked one or without it
    if (!first.current && locked !== null && !Number.isNaN(values[locked])) setView((now) => showing(now, values[locked], Math.floor(locked / neurons), all));
    first.current = false;
  }, [locked, all]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(base.current, width, room.h + BOTTOM);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, room.w, room.h);
    context.clip();
    if (dots) paintDots(context, dots, frame, theme);
    else paintCounts(context, sight, columns, frame, theme);
    context.restore();
    paintAxes(context, frame);
    if (!performance.getEntriesByName("neurons-painted").length) performance.mark("neurons-painted");
  }, [sight, dots, width, theme]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(over.current, width, room.h + BOTTOM);
    context.beginPath();
    context.rect(LEFT, 0, room.w, room.h);
    context.clip();
    for (const [index, thick] of [[locked, 2.5], [hovered, 1.5]])
      if (index !== null && !Number.isNaN(values[index])) paintMark(context, index, frame, thick, dots !== null);
  }, [hovered, locked, sight, dots, width, theme]);

  const share = (event) => {
    const area = over.current.getBoundingClientRect();
    return [(event.clientX - area.left - LEFT) / room.w, 1 - (event.clientY - area.top) / room.h];
  };
  function at(event) {
    const [across, up] = share(event);
    if (across < 0 || across > 1 || up < 0 || up >= 1) return null;
    const layer = Math.floor(view.y0 + up * (view.y1 - view.y0));
    if (layer >= layers) return null;
    if (!dots) return nearest(values, neurons, layer, view.x0 + across * (view.x1 - view.x0));
    const [x, y] = [LEFT + across * room.w, (1 - up) * room.h];
    let best = NEAR ** 2;
    let found = null;
    for (const index of dots) {
      const [dotX, dotY] = placeOf(index, frame);
      const distance = (dotX - x) ** 2 + (dotY - y) ** 2;
      if (distance < best) [best, found] = [distance, index];
    }
    return found;
  }

  const hands = useRef(new Map()); // pointers that are down, by id
  const dragged = useRef(0);
  function down(event) {
    hands.current.set(event.pointerId, share(event));
    dragged.current = 0;
    over.current.setPointerCapture(event.pointerId);
  }
  function move(event) {
    const before = hands.current.get(event.pointerId);
    if (!before) return onHover(at(event));
    const now = share(event);
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    dragged.current += Math.abs(dx) * room.w + Math.abs(dy) * room.h;
    if (hands.current.size === 1) {
      // a click is no drag, and one finger scrolls the page
      if (dragged.current > 3 && event.pointerType !== "touch") setView((from) => moved(from, -dx, -dy, all));
    } else {
      const other = [...hands.current].find(([id]) => id !== event.pointerId)[1];
      const apart = (p) => Math.hypot((p[0] - other[0]) * room.w, (p[1] - other[1]) * room.h) || 1;
      setView((from) => zoomed(from, apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2, all));
    }
    hands.current.set(event.pointerId, now);
  }
  const lift = (event) => hands.current.delete(event.pointerId);
  useEffect(() => {
    // not as an attribute: there the browser would scroll the page at the same time
    const wheel = (event) => {
      if (event.ctrlKey === false && event.deltaY === 0) return;
      event.preventDefault();
      const [across, up] = share(event);
      setView((from) => zoomed(from, Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), Math.min(1, Math.max(0, across)), up, all));
    };
    const canvas = over.current;
    canvas.addEventListener("wheel", wheel, { passive: false });
    return () => canvas.removeEventListener("wheel", wheel);
  }, [all, width, layers]);

  const larger = (factor) => {
    const [x, layer] = told === null ? [(view.x0 + view.x1) / 2, (view.y0 + view.y1) / 2] : [values[told], Math.floor(told / neurons) + 0.5];
    const into = (value, low, high) => Math.min(1, Math.max(0, (value - low) / (high - low)));
    setView((from) => zoomed(from, factor, into(x, from.x0, from.x1), into(layer, from.y0, from.y1), all));
  };
  function walk(index) {
    if (index === null) return;
    onHover(index);
    setView((from) => showing(from, values[index], Math.floor(index / neurons), all));
  }
  function key(event) {
    const from = told ?? nearest(values, neurons, Math.min(layers - 1, Math.floor(view.y1 - 0.01)), (view.x0 + view.x1) / 2);
    const to = (layer) => nearest(values, neurons, Math.max(0, Math.min(layers - 1, layer)), values[from]);
    const keys = {
      ArrowLeft: () => walk(next(values, neurons, from, -1)), ArrowRight: () => walk(next(values, neurons, from, 1)),
      ArrowUp: () => walk(to(Math.floor(from / neurons) + 1)), ArrowDown: () => walk(to(Math.floor(from / neurons) - 1)),
      "+": () => larger(STEP), "=": () => larger(STEP), "-": () => larger(1 / STEP), 0: () => setView(all),
      " ": () => onLock(from), Enter: () => onLock(from),
    };
    if (!keys[event.key] || from === null) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }

  return html`<div class="density" ref=${box}>
    <div class="zoom">
      <button class="plain small" aria-label="Larger" title="Larger (+)" onClick=${() => larger(STEP)}>+</button>
      <button class="plain small" aria-label="Smaller" title="Smaller (-)" onClick=${() => larger(1 / STEP)}>−</button>
      <button class="plain small" title="All neurons (0)" onClick=${() => setView(all)}>all</button>
    </div>
    <div class="stack">
      <canvas ref=${base} aria-hidden="true"></canvas>
      <canvas ref=${over} class="over" tabindex="0" role="application"
        aria-label=${`${label}: ${layers} layers of ${neurons} neurons by score; left and right walk by score, up and down over layers, plus and minus zoom, space locks`}
        onPointerDown=${down} onPointerMove=${move} onPointerUp=${lift} onPointerCancel=${lift} onPointerLeave=${() => onHover(null)}
        onClick=${(e) => dragged.current < 4 && at(e) !== null && (onHover(at(e)), onLock(at(e)))} onDblClick=${() => setView(all)} onKeyDown=${key}></canvas>
    </div>
    <p class="read" aria-live="polite">${told === null
      ? html`<span class="soft">Hover or walk with the arrows; click locks. Wheel, pinch, + and − zoom, dragging moves, a double click shows all.</span>`
      : html`<b>${neuronName(told, neurons)}</b> ${" "}${number(values[told], 4)}`}</p>
    <p class="soft legend sight">${sight.total.toLocaleString("en")} of ${values.length.toLocaleString("en")} neurons in sight,
      ${dots ? " each a dot; its height within the layer means nothing." : html` drawn as a density: the deeper the colour, the more (by logarithm, up to ${sight.most.toLocaleString("en")} in ${COLUMN} pixels). From ${MOST_DOTS.toLocaleString("en")} on, each is a dot.`}
      ${" "}Blue is above 0, red below.</p>
  </div>`;
}

const toX = (x, { view, room }) => LEFT + ((x - view.x0) / (view.x1 - view.x0)) * room.w;
const toY = (y, { view, room }) => room.h * (1 - (y - view.y0) / (view.y1 - view.y0));

// Neurons of a layer stand at several heights, always the same for one, so that fewer cover one another.
function placeOf(index, frame) {
  const within = ((index % frame.neurons) * 0.618034) % 1;
  return [toX(frame.values[index], frame), toY(Math.floor(index / frame.neurons) + 0.15 + 0.7 * within, frame)];
}

function paintCounts(context, sight, columns, frame, theme) {
  const { view, room } = frame;
  const image = new ImageData(columns, sight.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const depth = 255 / Math.log1p(sight.most);
  const tables = [-1, 1].map((sign) => Array.from({ length: 256 }, (_, i) => packed(rgb(sign * (0.14 + (0.86 * i) / 255), theme))));
  for (let column = 0; column < columns; column++) {
    const middle = view.x0 + ((column + 0.5) / columns) * (view.x1 - view.x0);
    const table = tables[middle < 0 ? 0 : 1];
    for (let row = 0; row < sight.rows; row++) {
      const count = sight.counts[row * columns + column];
      if (count) pixels[(sight.rows - 1 - row) * columns + column] = table[Math.round(depth * Math.log1p(count))];
    }
  }
  const small = document.createElement("canvas");
  [small.width, small.height] = [columns, sight.rows];
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  const top = toY(sight.first + sight.rows, frame);
  context.drawImage(small, LEFT, top, room.w, toY(sight.first, frame) - top);
}

const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;

function paintDots(context, dots, frame, theme) {
  const size = dots.length > 500 ? 2 : 3;
  for (const sign of [-1, 1]) {
    context.fillStyle = css(0.62 * sign, theme);
    for (const index of dots) {
      if (frame.values[index] < 0 !== sign < 0) continue;
      const [x, y] = placeOf(index, frame);
      context.beginPath();
      context.arc(x, y, size, 0, 7);
      context.fill();
    }
  }
}

function paintMark(context, index, frame, thick, single) {
  const [x, y] = single ? placeOf(index, frame) : [toX(frame.values[index], frame), 0];
  const layer = Math.floor(index / frame.neurons);
  for (const [colour, wide] of [["--panel", thick + 2.5], ["--ink", thick]]) {
    context.strokeStyle = variable(colour);
    context.lineWidth = wide;
    context.beginPath();
    if (single) context.arc(x, y, 6, 0, 7);
    else {
      context.moveTo(x, toY(layer + 1, frame));
      context.lineTo(x, toY(layer, frame));
    }
    context.stroke();
  }
}

function paintAxes(context, frame) {
  const { view, room } = frame;
  const [soft, line, panel] = ["--soft", "--line", "--panel"].map(variable);
  const high = room.h / (view.y1 - view.y0);
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  const every = Math.max(1, Math.ceil(14 / high));
  for (let layer = Math.floor(view.y0); layer < view.y1; layer++) {
    const [top, middle] = [toY(layer + 1, frame), toY(layer + 0.5, frame)];
    if (high >= 5) {
      context.fillStyle = panel;
      context.fillRect(LEFT, Math.round(top), room.w, 1);
    }
    context.fillStyle = soft;
    context.textBaseline = "middle";
    if (layer % every === 0 && middle > 4 && middle < room.h - 2) context.fillText(`L${layer}`, 2, middle);
  }
  context.strokeStyle = line;
  context.strokeRect(LEFT + 0.5, 0.5, room.w - 1, room.h - 1);
  context.textBaseline = "alphabetic";
  context.textAlign = "center";
  const step = tick((view.x1 - view.x0) / Math.max(2, room.w / 90));
  const digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(step) + 1e-9)));
  for (let i = Math.ceil(view.x0 / step); i * step <= view.x1; i++) {
    const x = toX(i * step, frame);
    context.fillStyle = i === 0 ? soft : line;
    context.fillRect(Math.round(x), i === 0 ? 0 : room.h, 1, i === 0 ? room.h + 4 : 4);
    context.fillStyle = soft;
    if (x > LEFT + 8 && x < LEFT + room.w - 8) context.fillText((i * step).toFixed(digits).replace("-", "−"), x, room.h + 17);
  }
  context.fillText("score", LEFT + room.w / 2, room.h + 31);
  context.textAlign = "start";
}

// The next round number: 1, 2 or 5 times a power of ten.
function tick(rough) {
  const size = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((times) => times * size >= rough * 0.999) * size;
}
