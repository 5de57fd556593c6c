// What part of a plane is in sight: scores from left to right, layers from the bottom up, each layer one high. Only
// numbers here; lib/density.js draws them. `values` [layer × neuron] row by row; a view is {x0, x1, y0, y1}.
const DEEPEST = 1e5; // how far the scores can be magnified: more is beyond what a float32 tells apart

// All scores, with 0 and a little room at both ends.
export function whole(values, neurons) {
  let low = 0;
  let high = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] < low) low = values[i];
    else if (values[i] > high) high = values[i];
  }
  const room = 0.02 * (high - low) || 1;
  return { x0: low < 0 ? low - room : 0, x1: high + room, y0: 0, y1: values.length / neurons };
}

function range(from, span, low, high) {
  const kept = Math.min(span, high - low);
  const start = Math.min(Math.max(from, low), high - kept);
  return [start, start + kept];
}

function placed(x, spanX, y, spanY, all) {
  const [x0, x1] = range(x, Math.max(spanX, (all.x1 - all.x0) / DEEPEST), all.x0, all.x1);
  const [y0, y1] = range(y, Math.max(spanY, 1), all.y0, all.y1);
  return { x0, x1, y0, y1 };
}

// Magnified around a place: shares of the width from the left and of the height from the bottom.
export function zoomed(view, factor, across, up, all) {
  const [w, h] = [view.x1 - view.x0, view.y1 - view.y0];
  const [spanX, spanY] = [Math.max(w / factor, (all.x1 - all.x0) / DEEPEST), Math.min(Math.max(h / factor, 1), all.y1 - all.y0)];
  return placed(view.x0 + across * (w - spanX), spanX, view.y0 + up * (h - spanY), spanY, all);
}

// Moved by shares of what is in sight.
export function moved(view, across, up, all) {
  const [w, h] = [view.x1 - view.x0, view.y1 - view.y0];
  return placed(view.x0 + across * w, w, view.y0 + up * h, h, all);
}

// Moved no further than it takes to see a neuron.
export function showing(view, x, layer, all) {
  const [w, h] = [view.x1 - view.x0, view.y1 - view.y0];
  const x0 = x < view.x0 ? x - 0.1 * w : x > view.x1 ? x - 0.9 * w : view.x0;
  const y0 = layer < view.y0 ? layer : layer + 1 > view.y1 ? layer + 1 - h : view.y0;
  return placed(x0, w, y0, h, all);
}

const same = (a, b) => ["x0", "x1", "y0", "y1"].every((side) => a[side] === b[side]);

// As it stands in the address; null for the whole.
export const written = (view, all) => (same(view, all) ? null : [view.x0, view.x1, view.y0, view.y1].map((side) => Number(side.toPrecision(7))).join());

// The whole, where there is none in the address or somebody cut it short.
export function read(text, all) {
  const sides = (text || "").split(",").map(Number);
  if (sides.length !== 4 || !sides.every(Number.isFinite) || sides[0] >= sides[1] || sides[2] >= sides[3]) return all;
  return placed(sides[0], sides[1] - sides[0], sides[2], sides[3] - sides[2], all);
}

// How many neurons of each layer in sight fall into each column: {first, rows, counts [row × column], total, most}.
export function counted(values, neurons, view, columns) {
  const first = Math.floor(view.y0);
  const rows = Math.min(Math.ceil(view.y1), values.length / neurons) - first;
  const counts = new Uint32Array(rows * columns);
  const scale = columns / (view.x1 - view.x0);
  const { x0, x1 } = view;
  let total = 0;
  let most = 0;
  for (let row = 0; row < rows; row++) {
    const start = (first + row) * neurons;
    for (let i = start; i < start + neurons; i++) {
      const value = values[i];
      if (!(value >= x0 && value <= x1)) continue; // nor one that was not measured
      const at = row * columns + Math.min(columns - 1, Math.floor((value - x0) * scale));
      total++;
      if (++counts[at] > most) most = counts[at];
    }
  }
  return { first, rows, counts, total, most };
}

// Indices of the neurons in sight.
export function within(values, neurons, { x0, x1, y0, y1 }) {
  const found = [];
  const end = Math.min(Math.ceil(y1) * neurons, values.length);
  for (let i = Math.floor(y0) * neurons; i < end; i++) if (values[i] >= x0 && values[i] <= x1) found.push(i);
  return found;
}

// The neuron of a layer whose score is closest, or null.
export function nearest(values, neurons, layer, x) {
  let best = Infinity;
  let found = null;
  for (let i = layer * neurons; i < (layer + 1) * neurons; i++) {
    const distance = Math.abs(values[i] - x);
    if (distance < best) [best, found] = [distance, i];
  }
  return found;
}

// The neuron of the same layer that comes next by score, those of equal scores by their number; the same at the end.
export function next(values, neurons, from, by) {
  const start = from - (from % neurons);
  const after = (i, j) => by * (values[i] - values[j] || i - j) > 0;
  let found = null;
  for (let i = start; i < start + neurons; i++) if (after(i, from) && (found === null || after(found, i))) found = i;
  return found ?? from;
}

// Indices of the k highest scores, or of the lowest for a sign of -1.
export function extremes(values, k, sign = 1) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    const value = sign * values[i];
    if (Number.isNaN(value) || (best.length === k && value <= sign * values[best[k - 1]])) continue;
    let at = best.length;
    while (at > 0 && value > sign * values[best[at - 1]]) at--;
    best.splice(at, 0, i);
    if (best.length > k) best.pop();
  }
  return best;
}

// Its place from the highest, from 1, and how many were measured.
export function rankOf(values, index) {
  let above = 0;
  let of = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] > values[index]) above++;
    if (!Number.isNaN(values[i])) of++;
  }
  return { rank: above + 1, of };
}
