// A route as a drawing: tokens from left to right, layers from the bottom up. Hover previews, click locks; drag and
// wheel (with Ctrl) move and zoom. Signs by colour and by dashes.
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";
import { css } from "./colour.js";
import { useWidth } from "./heat.js";
import { useTheme } from "./theme.js";
import { visible } from "./text.js";

const LEFT = 36;
const TOP = 16;
const LABELS = 84;
const LIFT = { embed: 0, bias: 0.25, mid: 0.5, mlp: 0.75, post: 1 };
const ASIDE = { mlp: 9, bias: -9 };

export const edgeId = (edge) => `${edge.component || edge.kind}:${edge.source}>${edge.target}`;

function curve([x1, y1], [x2, y2], bend) {
  if (x1 === x2 && !bend) return `M${x1},${y1}L${x2},${y2}`;
  const middle = (y1 + y2) / 2;
  return `M${x1},${y1}C${x1 + bend},${middle} ${x2 + bend},${middle} ${x2},${y2}`;
}

export function Graph({ route, hovered, locked, onHover, onLock }) {
  const box = useRef();
  const svg = useRef();
  const width = useWidth(box);
  const theme = useTheme();
  const [view, setView] = useState({ k: 1, x: 0, y: 0 });
  const zoom = useRef();

  const drawing = useMemo(() => {
    const nodes = new Map(route.nodes.map((node) => [node.id, node]));
    const columns = [...new Set(route.nodes.map((node) => node.position))].sort((a, b) => a - b);
    const layers = 1 + Math.max(0, ...route.nodes.map((node) => node.layer ?? 0));
    const column = Math.max(30, Math.min(130, (Math.max(width, 340) - LEFT - 40) / columns.length));
    const row = Math.max(15, Math.min(34, 620 / layers));
    const bottom = TOP + layers * row;
    const x = new Map(columns.map((p, i) => [p, LEFT + (i + 0.5) * column]));
    const place = (id) => {
      const node = nodes.get(id);
      const level = node.layer === null ? 0 : node.layer + LIFT[node.kind];
      return [x.get(node.position) + (ASIDE[node.kind] || 0), bottom - level * row];
    };
    const seen = new Map();
    const edges = route.edges.map((edge) => {
      const pair = `${edge.source}>${edge.target}`;
      const twin = seen.get(pair) || 0; // heads on the same way are drawn side by side
      seen.set(pair, twin + 1);
      const bend = edge.kind === "head" ? (twin % 2 ? -1 : 1) * Math.ceil((twin + (place(edge.source)[0] === place(edge.target)[0] ? 1 : 0)) / 2) * 7 : 0;
      return { edge, id: edgeId(edge), path: curve(place(edge.source), place(edge.target), bend) };
    });
    // where nothing but the stream goes in and out there is nothing to see, and nodes would hide the edges
    const busy = new Set(route.edges.filter((e) => e.kind !== "residual").flatMap((e) => [e.source, e.target]));
    const dots = route.nodes.filter((node, i) => i === 0 || node.kind === "embed" || busy.has(node.id));
    return { columns, layers, row, bottom, x, place, edges, dots, w: LEFT + columns.length * column + 40, h: bottom + LABELS };
  }, [route, width]);
  const most = Math.max(1e-9, ...route.edges.filter((e) => e.kind !== "residual").map((e) => Math.abs(e.signed)));

  useEffect(() => {
    let current = true;
    import("./plot.js").then(({ d3 }) => {
      if (!current || !svg.current) return;
      zoom.current = d3.zoom().scaleExtent([0.5, 8]).on("zoom", ({ transform }) => setView(transform))
        .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button));
      zoom.current.reset = () => d3.select(svg.current).call(zoom.current.transform, d3.zoomIdentity);
      zoom.current.by = (k) => d3.select(svg.current).call(zoom.current.scaleBy, k);
      d3.select(svg.current).call(zoom.current).on("dblclick.zoom", null);
    });
    return () => {
      current = false;
    };
  }, []);

  const colour = (edge) =>
    edge.kind === "residual" ? "var(--cell-none)" : css((edge.signed < 0 ? -1 : 1) * (0.45 + (0.55 * Math.abs(edge.signed)) / most), theme);
  const { columns, layers, row, bottom, x, place, edges, dots, w, h } = drawing;
  const told = hovered || locked;

  return html`<div class="graph" ref=${box}>
    <div class="zoom">
      <button class="plain small" aria-label="Larger" onClick=${() => zoom.current?.by(1.4)}>+</button>
      <button class="plain small" aria-label="Smaller" onClick=${() => zoom.current?.by(1 / 1.4)}>−</button>
      <button class="plain small" onClick=${() => zoom.current?.reset()}>whole</button>
    </div>
    <div class="scroll">
    <svg ref=${svg} width=${w} height=${h} viewBox=${`0 0 ${w} ${h}`} role="img" aria-label=${`Route graph with ${route.nodes.length} nodes and ${route.edges.length} edges; the table beside it lists its heads`}>
      <g transform=${`translate(${view.x},${view.y}) scale(${view.k})`}>
        ${Array.from({ length: layers }, (_, l) => l % 2 === 0 && html`<rect class="band" x=${LEFT - 6} y=${bottom - (l + 1) * row} width=${w - LEFT} height=${row} />`)}
        ${Array.from({ length: layers }, (_, l) => l % Math.ceil(14 / row) === 0 && html`<text x="2" y=${bottom - (l + 0.5) * row + 4}>L${l}</text>`)}
        ${edges.map(({ edge, id, path }) => html`<path key=${id} d=${path} class=${`edge ${edge.kind} ${id === told ? "told" : ""}`}
          stroke=${colour(edge)} stroke-width=${edge.kind === "residual" ? 1.5 : 1 + 8 * edge.weight} stroke-dasharray=${edge.kind !== "residual" && edge.signed < 0 ? "4 3" : null} />`)}
        ${edges.map(({ edge, id, path }) => html`<path key=${`hit ${id}`} d=${path} class="hit" data-edge=${id}
          onPointerEnter=${() => onHover(id)} onPointerLeave=${() => onHover(null)} onClick=${() => onLock(id)} />`)}
        ${dots.map((node) => {
          const [cx, cy] = place(node.id);
          const props = { key: node.id, class: `node ${node.kind} ${node.id === told ? "told" : ""}`, "data-node": node.id,
            onPointerEnter: () => onHover(node.id), onPointerLeave: () => onHover(null), onClick: () => onLock(node.id) };
          return node.kind === "mlp" ? html`<rect ...${props} x=${cx - 3.5} y=${cy - 3.5} width="7" height="7" />`
            : html`<circle ...${props} cx=${cx} cy=${cy} r=${node.id === route.nodes[0].id ? 5 : 2.8} />`;
        })}
        ${columns.map((p) => html`<text key=${p} class=${p === route.position ? "at" : ""} transform=${`translate(${x.get(p) - 2},${bottom + 14}) rotate(50)`}>${visible(route.tokens[p])}</text>`)}
      </g>
    </svg></div>
  </div>`;
}
