// How numbers travel: matrices as raw numbers behind a JSON head (see page/wire.py).
export const bytes = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

// half-precision floats by table: browsers without Float16Array are still around
let halves;
function half(bits) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

export function matrix(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const start = 4 + length;
  if (head.dtype === "float32") return { ...head, values: new Float32Array(buffer, start) };
  if (!halves) {
    halves = new Float32Array(65536);
    for (let i = 0; i < 65536; i++) halves[i] = half(i);
  }
  const bits = new Uint16Array(buffer, start);
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = halves[bits[i]];
  return { ...head, values };
}
