// How tokens and numbers are written.
export function visible(token) {
  return token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e5)) return value.toExponential(1).replaceAll("-", "−");
  return value.toFixed(digits).replace("-", "−");
}

export const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(2)} %`);

export const signed = (value, digits = 3) =>
  (value > 0 ? "+" : "") + number(value, digits);

export const name = (layer, head) => `L${layer}H${head}`;

// "L5H3", "l5 h3", "5.3" → [5, 3]
export function parseHead(text) {
  const found = /^\s*l?\s*(\d+)\s*[.,/ ]?\s*h?\s*(\d+)\s*$/i.exec(text);
  return found && /[lh.,/ ]/i.test(text.trim()) ? [Number(found[1]), Number(found[2])] : null;
}

export const neuronName = (index, neurons) => `L${Math.floor(index / neurons)}N${index % neurons}`;

// "L5N7", "l5 n7" → [5, 7]
export function parseNeuron(text) {
  const found = /^\s*l\s*(\d+)\s*n\s*(\d+)\s*$/i.exec(text);
  return found && [Number(found[1]), Number(found[2])];
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}
