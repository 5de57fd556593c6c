// A route on a canvas. Wheel zooms, dragging moves; hovering draws only the overlay, so that large routes stay fluid.
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";
import { css, limit, variable } from "./colour.js";
import { prepared, useWidth } from "./heat.js";
import { away, layout } from "./layout.js";
import { useTheme } from "./theme.js";
import { signed, visible } from "./text.js";

const LEFT = 34; // room for the names of layers
const [FLAT, SLOPED] = [26, 78]; // and of tokens, which stand aslant where there are many
const TOP = 10;
const NEAR = 9; // pixels from the pointer
const SHADES = 20;

export function RouteGraph({ route, tokens, locked, onLock }) {
  const [hovered, setHovered] = useState(null);
  const box = useRef();
  const base = useRef();
  const over = useRef();
  const zoom = useRef();
  const width = useWidth(box);
  const theme = useTheme();
  const layers = 1 + Math.max(0, ...route.nodes.map((node) => node.layer ?? 0));
  const room = { w: Math.max(60, width - LEFT - 12), h: Math.max(180, Math.min(640, layers * 22)) };
  const [squeezed, squeeze] = useState(false);
  const drawing = useMemo(() => layout(route, room.w, room.h, squeezed), [route, width, squeezed]);
  const LABELS = drawing.columns.some((p) => 7.2 * visible(tokens[p]).length + 8 > drawing.column) ? SLOPED : FLAT;
  const height = TOP + room.h + LABELS;
  const [view, setView] = useState(null); // {k, x, y} of the drawing inside its frame
  const at = view || start(drawing, room);
  const known = useMemo(() => new Map([...drawing.nodes, ...drawing.edges].map((item) => [item.id, item])), [drawing]);
  const most = useMemo(() => signedLimit(route), [route]);
  const order = useMemo(() => byWeight(drawing.edges), [drawing]);

  const toScreen = (x, y) => [LEFT + at.x + x * at.k, TOP + at.y + y * at.k];

  useEffect(() => {
    let current = true;
    import("./plot.js").then(({ d3 }) => {
      if (!current || !over.current) return;
      const canvas = d3.select(over.current);
      const behaviour = d3.zoom().scaleExtent([0.05, 24])
        // one finger scrolls the page, two zoom
        .filter((event) => (event.type === "touchstart" ? event.touches.length > 1 : !event.button))
        .on("zoom", ({ transform, sourceEvent }) => sourceEvent !== null && setView({ k: transform.k, x: transform.x, y: transform.y }));
      canvas.call(behaviour).on("dblclick.zoom", null);
      zoom.current = {
        put: (to) => canvas.call(behaviour.transform, d3.zoomIdentity.translate(to.x, to.y).scale(to.k)),
        by: (factor, from) => {
          const middle = [room.w / 2, room.h / 2];
          const k = Math.max(0.05, Math.min(24, from.k * factor));
          return { k, x: middle[0] - ((middle[0] - from.x) / from.k) * k, y: middle[1] - ((middle[1] - from.y) / from.k) * k };
        },
      };
      zoom.current.put(at);
    });
    return () => {
      current = false;
    };
  }, [drawing]);
  const put = (to) => {
    setView(to);
    zoom.current?.put(to || start(drawing, room));
  };
  const fit = (all) => (squeeze(all), put(null));
  const larger = (factor) => zoom.current && put(zoom.current.by(factor, at));

  useEffect(() => {
    if (!width) return;
    const context = prepared(base.current, width, height);
    const [ink, soft, panel, band, grey] = ["--ink", "--soft", "--panel", "--token", "--cell-none"].map(variable);
    const shades = [1, -1].map((sign) => Array.from({ length: SHADES + 1 }, (_, i) => css(sign * (0.36 + (0.64 * i) / SHADES), theme)));
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height - LABELS);
    context.clip();
    const rowHeight = drawing.row * at.k;
    const space = drawing.column * at.k;
    context.globalAlpha = 0.5;
    context.fillStyle = band;
    for (let l = 0; l < drawing.layers; l += 2) context.fillRect(LEFT, toScreen(0, drawing.bottom - (l + 1) * drawing.row)[1], width, rowHeight);
    context.globalAlpha = 1;
    const [left, right, top, bottom] = [-at.x / at.k - 20, (width - LEFT - at.x) / at.k + 20, -at.y / at.k - 40, (height - at.y) / at.k];
    for (const edge of order) {
      const last = edge.line.length - 2;
      const [x0, y0, x1, y1] = [edge.line[0], edge.line[1], edge.line[last], edge.line[last + 1]];
      if ((x0 < left && x1 < left) || (x0 > right && x1 > right) || y0 < top || y1 > bottom) continue; // out of sight
      const plain = edge.kind === "residual" || edge.kind === "input";
      context.strokeStyle = plain ? grey : shades[edge.signed < 0 ? 1 : 0][Math.round(SHADES * Math.min(1, Math.abs(edge.signed) / most))];
      context.lineWidth = thickness(edge, at.k, space);
      context.setLineDash(!plain && edge.signed < 0 ? [5, 3] : []);
      trace(context, edge.line, at);
      context.stroke();
    }
    context.setLineDash([]);
    const size = Math.max(0.7, Math.min(5, 2.6 * Math.sqrt(at.k), 0.16 * drawing.column * at.k));
    for (const node of drawing.nodes) {
      if (!node.busy) continue;
      const [x, y] = toScreen(node.x, node.y);
      if (x < 0 || x > width || y < -9 || y > height) continue;
      dot(context, node, x, y, node.id === route.nodes[0].id ? size * 1.7 : size, { ink, soft, panel });
    }
    context.restore();
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = soft;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(13 / rowHeight));
    for (let l = 0; l < drawing.layers; l += every) {
      const y = toScreen(0, drawing.bottom - (l + 0.5) * drawing.row)[1];
      if (y > 4 && y < height - LABELS) context.fillText(`L${l}`, 2, y);
    }
    const step = Math.max(1, Math.ceil(13 / space));
    context.save();
    context.beginPath();
    context.rect(0, height - LABELS, width, LABELS);
    context.clip();
    drawing.columns.forEach((p, i) => {
      const x = toScreen(drawing.x.get(p), 0)[0];
      if ((i % step && p !== route.position) || x < LEFT - 2 || x > width) return;
      context.fillStyle = p === route.position ? ink : soft;
      context.font = `${p === route.position ? "700 " : ""}11px system-ui, sans-serif`;
      context.save();
      context.translate(x, height - LABELS + 8);
      const word = visible(tokens[p]);
      if (LABELS === FLAT || context.measureText(word).width < space - 6) {
        context.textAlign = "center";
        context.fillText(word, 0, 4);
      } else {
        context.rotate(Math.PI / 3.4);
        context.fillText(word.length > 14 ? `${word.slice(0, 13)}…` : word, 0, 2);
      }
      context.restore();
    });
    context.restore();
    if (!performance.getEntriesByName("route-painted").length) performance.mark("route-painted");
  }, [drawing, at.k, at.x, at.y, width, theme]);

  useEffect(() => {
    if (!width) return;
    const context = prepared(over.current, width, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height - LABELS);
    context.clip();
    for (const [id, dash] of [[locked, []], [hovered, [4, 2]]]) {
      const item = known.get(id);
      if (!item) continue;
      context.strokeStyle = variable("--mark");
      context.setLineDash(dash);
      if (item.line) {
        context.lineWidth = thickness(item, at.k, drawing.column * at.k) + 7;
        context.globalAlpha = 0.4; // its own colour stays to be seen
        trace(context, item.line, at);
        context.stroke();
        context.globalAlpha = 1;
      } else {
        const [x, y] = toScreen(item.x, item.y);
        context.lineWidth = 2.5;
        context.beginPath();
        context.arc(x, y, 8, 0, 7);
        context.stroke();
      }
    }
    context.restore();
  }, [drawing, known, hovered, locked, at.k, at.x, at.y, width, theme]);

  function find(event) {
    const area = over.current.getBoundingClientRect();
    const x = (event.clientX - area.left - LEFT - at.x) / at.k;
    const y = (event.clientY - area.top - TOP - at.y) / at.k;
    if (event.clientY - area.top > height - LABELS + 4) return null;
    let best = (NEAR / at.k) ** 2;
    let found = null;
    for (const edge of drawing.edges) {
      const distance = away(edge.line, x, y);
      if (distance < best) [best, found] = [distance, edge.id];
    }
    let nearest = (NEAR / at.k) ** 2 * 0.6; // a dot is on top of the lines
    for (const node of drawing.nodes) {
      const distance = (node.x - x) ** 2 + (node.y - y) ** 2;
      if (node.busy && distance < nearest) [nearest, found] = [distance, node.id];
    }
    return found;
  }

  function key(event) {
    const told = known.get(hovered ?? locked);
    const node = told && !told.line ? told : told ? drawing.byId.get(told.target) : drawing.nodes[0];
    const column = (p) => drawing.nodes.filter((n) => n.position === p && n.busy).sort((a, b) => b.y - a.y);
    const into = drawing.edges.filter((e) => e.target === node.id).sort((a, b) => b.weight - a.weight);
    const mine = column(node.position);
    const sideways = (by) => {
      const p = drawing.columns[drawing.columns.indexOf(node.position) + by];
      return p === undefined ? node : column(p).reduce((a, b) => (Math.abs(b.y - node.y) < Math.abs(a.y - node.y) ? b : a));
    };
    const upwards = (by) => {
      const place = mine.findIndex((n) => n.id === node.id);
      return mine[Math.max(0, Math.min(mine.length - 1, (place < 0 ? mine.length - 1 : place) + by))] || node;
    };
    const steps = {
      ArrowUp: () => upwards(1), ArrowDown: () => upwards(-1), ArrowLeft: () => sideways(-1), ArrowRight: () => sideways(1),
      // the edges into a state, the heaviest first
      "]": () => into[told?.line ? (into.indexOf(told) + 1) % into.length : 0],
      "[": () => into.at(told?.line ? into.indexOf(told) - 1 : -1),
    };
    if (steps[event.key]) {
      const found = told || event.key === "]" || event.key === "[" ? steps[event.key]() : node;
      if (found) setHovered(found.id);
    } else if (event.key === "+" || event.key === "=") larger(1.4);
    else if (event.key === "-") larger(1 / 1.4);
    else if (event.key === "0") fit(true);
    else if (event.key === " " || event.key === "Enter") onLock((told || node).id);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  const ranks = useMemo(() => ranked(drawing.edges), [drawing]);
  return html`<div class="route-graph" ref=${box}>
    <div class="zoom">
      <button class="plain small" aria-label="Larger" title="Larger (+)" onClick=${() => larger(1.4)}>+</button>
      <button class="plain small" aria-label="Smaller" title="Smaller (-)" onClick=${() => larger(1 / 1.4)}>−</button>
      <button class="plain small" title="The whole route (0)" onClick=${() => fit(true)}>fit</button>
      ${squeezed && drawing.column < 26 && html`<button class="plain small" onClick=${() => fit(false)}>wide</button>`}
    </div>
    <div class="stack">
      <canvas ref=${base} aria-hidden="true"></canvas>
      <canvas ref=${over} class="over" tabindex="0" role="application"
        aria-label=${`Route of ${route.nodes.length} states and ${drawing.edges.length} edges; arrows walk over states, brackets over the edges into one, space locks, plus and minus zoom`}
        onPointerMove=${(e) => e.buttons || setHovered(find(e))} onPointerLeave=${() => setHovered(null)}
        onClick=${(e) => find(e) && onLock(find(e))} onKeyDown=${key}></canvas>
    </div>
    <${RouteRead} item=${known.get(hovered ?? locked)} route=${route} tokens=${tokens} ranks=${ranks} />
  </div>`;
}

// At first the layers fill the height; a route of many tokens shows the end, where the prediction is.
const start = (drawing, room) => ({ k: 1, x: (room.w - drawing.width) / (drawing.width < room.w ? 2 : 1), y: 0 });

// Both ends of the colours: most edges within, so that a few huge ones (often at the first token) do not pale the rest.
export function signedLimit(route) {
  const sizes = route.edges.filter((e) => e.kind !== "residual" && e.kind !== "input").map((e) => Math.abs(e.signed)).sort((a, b) => a - b);
  return sizes[Math.floor(0.97 * (sizes.length - 1))] || limit(sizes);
}

const byWeight = (edges) => [...edges].sort((a, b) => (a.kind !== "residual") - (b.kind !== "residual") || a.weight - b.weight);
const GROWTH = { residual: 3, input: 0 };
// `space`: pixels between two tokens; where they are close, thick lines would be one grey field
const thickness = (edge, k, space) => (1 + (GROWTH[edge.kind] ?? 9) * Math.min(1, edge.weight)) * Math.max(0.5, Math.min(2, Math.sqrt(k))) * Math.max(0.2, Math.min(1, space / 20));

function trace(context, points, { k, x, y }) {
  context.beginPath();
  context.moveTo(LEFT + x + points[0] * k, TOP + y + points[1] * k);
  for (let i = 2; i < points.length; i += 2) context.lineTo(LEFT + x + points[i] * k, TOP + y + points[i + 1] * k);
}

function dot(context, node, x, y, size, { ink, soft, panel }) {
  context.beginPath();
  if (node.kind === "mlp") {
    context.rect(x - size, y - size, 2 * size, 2 * size);
    context.fillStyle = panel;
    context.fill();
    context.strokeStyle = ink;
    context.lineWidth = 1.2;
    context.stroke();
  } else {
    context.arc(x, y, size, 0, 7);
    context.fillStyle = node.kind === "bias" ? soft : ink;
    context.fill();
  }
}

function ranked(edges) {
  const order = edges.filter((e) => e.kind === "head").sort((a, b) => b.weight - a.weight);
  return new Map(order.map((edge, i) => [edge.id, `${i + 1} of ${order.length} by weight`]));
}

const WAYS = { residual: "the stream itself", mlp: "what the MLP wrote", input: "what the MLP read", bias: "biases of the attention" };

function RouteRead({ item, route, tokens, ranks }) {
  if (!item) return html`<p class="read soft" aria-live="polite">Hover or walk with the arrows; click locks, click again or Esc releases. Wheel zooms, drag moves.</p>`;
  const token = (id) => {
    const p = Number(id.split("@")[1]);
    return html`<code class="token">${visible(tokens[p])}</code><small class="soft"> ${p}</small>`;
  };
  const goal = route.foil === null ? "the target’s logit" : "target − foil";
  if (!item.line) {
    const what = { embed: "the token’s embedding", mid: `the stream after layer ${item.layer}’s attention`, post: `the stream after layer ${item.layer}`, mlp: `MLP of layer ${item.layer}`, bias: `biases of layer ${item.layer}’s attention` };
    return html`<p class="read" aria-live="polite"><b>${item.id}</b> ${what[item.kind]} at ${token(item.id)}</p>`;
  }
  const heads = item.kind === "head" ? item.parts.map((part) => part.component.replace(/^L\d+/, "")) : null;
  const layer = item.target.match(/\d+/)[0];
  return html`<p class="read" aria-live="polite">
    ${heads ? html`<b>L${layer} ${heads.slice(0, 4).join(" ")}${heads.length > 4 ? ` + ${heads.length - 4}` : ""}</b> ${" "}${token(item.target)} ← ${token(item.source)}`
      : html`<b>${item.source} → ${item.target}</b> ${WAYS[item.kind]}`}
    ${item.kind === "input" ? "" : html`: <b>${(100 * item.weight).toFixed(1)} %</b> of that state${ranks.has(item.id) ? ` (${ranks.get(item.id)})` : ""}, <b>${signed(item.signed)}</b> to ${goal}${item.kind === "residual" ? "" : item.signed > 0 ? ": for it" : ": against it"}`}
  </p>`;
}
