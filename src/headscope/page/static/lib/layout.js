// Where a route's states and edges stand: reached tokens from left to right, layers from the bottom up.
const LIFT = { embed: 0, bias: 0.28, mid: 0.5, mlp: 0.76, post: 1 };
const ASIDE = { mlp: 0.26, bias: -0.26 };
const STEPS = 6; // pieces of a curve

// Heads on the same way are one edge. Its id: "L4@3>L5A@5" for heads, "L4@3=L5A@3" for anything else.
export function grouped(route) {
  const found = new Map();
  for (const edge of route.edges) {
    const id = `${edge.source}${edge.kind === "head" ? ">" : "="}${edge.target}`;
    const group = found.get(id);
    if (!group) found.set(id, { ...edge, id, parts: [edge] });
    else {
      group.parts.push(edge);
      group.weight += edge.weight;
      group.signed += edge.signed;
    }
  }
  for (const group of found.values()) group.parts.sort((a, b) => b.weight - a.weight);
  return [...found.values()];
}

// `width`, `height`: what there is to fill; many tokens go beyond the width unless they are to be squeezed into it. Places
// are in CSS pixels before any zoom, y downwards from 0 at the top layer.
export function layout(route, width, height, squeezed) {
  const columns = [...new Set(route.nodes.map((node) => node.position))].sort((a, b) => a - b);
  const layers = 1 + Math.max(0, ...route.nodes.map((node) => node.layer ?? 0));
  const column = Math.max(squeezed ? 0.5 : 26, Math.min(120, width / columns.length));
  const row = Math.max(9, height / (layers + 0.5));
  const x = new Map(columns.map((p, i) => [p, (i + 0.5) * column]));
  const bottom = (layers + 0.25) * row;
  const nodes = route.nodes.map((node) => ({
    ...node,
    x: x.get(node.position) + (ASIDE[node.kind] || 0) * Math.min(column, 60),
    y: bottom - (node.layer === null ? 0 : node.layer + LIFT[node.kind]) * row,
  }));
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const edges = grouped(route).map((edge) => ({ ...edge, line: line(edge, byId.get(edge.source), byId.get(edge.target), column) }));
  // only what something other than the stream itself goes into or out of gets a dot; dots everywhere would hide the edges
  const busy = new Set(route.edges.filter((e) => e.kind !== "residual").flatMap((e) => [e.source, e.target]));
  for (const node of nodes) node.busy = busy.has(node.id) || node.kind === "embed" || node.id === route.nodes[0].id;
  return { columns, layers, column, row, bottom, x, nodes, byId, edges, width: columns.length * column, height: (layers + 0.5) * row };
}

// Points of an edge: straight where it goes up within its own token, bent aside for a head that looks at its own token.
function line(edge, from, to, column) {
  const self = from.position === to.position;
  if (self && edge.kind !== "head") return [from.x, from.y, to.x, to.y];
  const aside = self ? -0.3 * Math.min(column, 60) : 0;
  const points = [];
  for (let i = 0; i <= STEPS; i++) {
    const t = i / STEPS;
    const s = 1 - t;
    const [a, b, c, d] = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
    points.push((a + b) * from.x + (c + d) * to.x + (b + c) * aside, a * from.y + (b + c) * (from.y + to.y) / 2 + d * to.y);
  }
  return points;
}

// Squared distance of a point from an edge.
export function away(points, x, y) {
  let best = Infinity;
  for (let i = 0; i + 3 < points.length; i += 2) {
    const [ax, ay] = [points[i], points[i + 1]];
    const [dx, dy] = [points[i + 2] - ax, points[i + 3] - ay];
    const t = Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy || 1)));
    const [ex, ey] = [ax + t * dx - x, ay + t * dy - y];
    best = Math.min(best, ex * ex + ey * ey);
  }
  return best;
}
